//! Tests below the public surface.
