"""``cupy.cuda.nccl`` of the stand-in: its names only."""

(
    NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_INT64, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16,
) = range(8)  # fmt: skip
NCCL_SUM = 0
