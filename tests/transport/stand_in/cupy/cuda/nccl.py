"""``cupy.cuda.nccl`` of the stand-in: there is none."""

available = False
