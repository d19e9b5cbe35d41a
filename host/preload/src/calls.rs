//! The functions of the C library that this library intercepts, by family.

mod descriptors;
mod events;
mod processes;
mod transfer;
