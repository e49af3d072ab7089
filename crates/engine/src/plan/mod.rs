//! Decisions made before anything is allocated: pure, printable, serialisable, the same for the same input.

mod activations;
mod step;

pub use activations::{
    ActivationPlan, CallKind, CallTimes, Choice, LayerCost, LayerPlan, MeasuredCall, MeasuredPass, Moment, PassCost,
    PassEvent, PassSample, TensorCost,
};
pub use step::{
    ALIGN_ELEMENTS, Bucket, Chunk, HOST_OPERANDS, Home, Piece, PlanOptions, StepPlan, TensorSpec, columns_for,
    formats_for, state_bytes,
};
