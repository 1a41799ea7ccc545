//! The CPU engine: float32, the readable reference.
