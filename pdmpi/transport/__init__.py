"""Messages between ranks: one protocol, in process or over MPI, from host or device memory."""
