"""The models of the pipeline papers, and data to train them on; each module holds one family.

Every factory is named in ``configs/NAME.toml`` at the published size, and in
``configs/NAME-small.toml`` at a size that a processor trains in seconds.
"""
