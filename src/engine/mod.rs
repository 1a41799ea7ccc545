//! What the models run on: one trait, and one folder for each implementation.
