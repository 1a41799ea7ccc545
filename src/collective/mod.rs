//! All-reduce and broadcast between drafters: shared memory on CPUs, NCCL on GPUs.
