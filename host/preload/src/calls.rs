//! The functions of the C library that programs call, by family.

mod descriptors;
mod events;
mod processes;
mod transfer;
