//! Printed kernels.

mod kernels;
