//! State on the host, with the ring it streams through where it does.

use std::sync::Arc;

use super::{Binding, HostState, StepInputs, StreamedAdamW, check};
use crate::error::Result;
use crate::pipeline::Pipeline;
use crate::plan::StepPlan;

/// AdamW whose state lies on the host, wherever it is updated.
#[derive(Debug)]
pub struct PlacedAdamW {
    state: HostState,
    streamed: Option<StreamedAdamW>,
}

impl PlacedAdamW {
    /// State that streams through a pipeline, or without one is updated on the host alone.
    pub fn new(state: HostState, pipeline: Option<Arc<Pipeline>>) -> Self {
        let streamed = pipeline.map(|pipeline| StreamedAdamW::from_parts(state.clone(), pipeline));
        Self { state, streamed }
    }

    /// The plan it follows.
    pub fn plan(&self) -> &StepPlan {
        self.state.plan()
    }

    /// The state. Read it after [`Self::settle`].
    pub fn state(&self) -> &HostState {
        &self.state
    }

    /// The state alone, for a ring that is made again later.
    pub fn into_state(self) -> HostState {
        self.state
    }

    /// The streamed half, where there is one.
    pub fn streamed(&self) -> Option<&StreamedAdamW> {
        self.streamed.as_ref()
    }

    /// Refuses tensors that are not the planned ones, before anything is touched.
    pub fn check(&self, tensors: &[Binding], inputs: &StepInputs<'_>) -> Result<()> {
        check(self.plan(), tensors, inputs)
    }

    /// Blocks until a tensor's stores have ended; what the host updates is there when a step returns.
    pub fn settle(&self, tensor: usize) -> Result<()> {
        self.streamed.as_ref().map_or(Ok(()), |streamed| streamed.settle(tensor))
    }
}
