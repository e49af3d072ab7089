//! Timed intervals of the stages, in the device's own time.

use serde::Serialize;

/// What a span times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Toward the device.
    Fetch,
    /// The kernel.
    Update,
    /// Away from the device.
    Store,
}

impl Stage {
    /// All of them, in the order in which a chunk passes them.
    pub const ALL: [Self; 3] = [Self::Fetch, Self::Update, Self::Store];
}

/// One timed interval, in nanoseconds since the beginning of its step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Span {
    /// What was done.
    pub stage: Stage,
    /// To which chunk.
    pub chunk: u32,
    /// In which slot.
    pub slot: u32,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Bytes moved or updated.
    pub bytes: u64,
}

/// The spans of one step. It keeps as many as it was made for and counts the rest.
#[derive(Debug, Clone, Default)]
pub struct Trace {
    spans: Vec<Span>,
    dropped: u64,
}

impl Trace {
    /// A trace with room for this many spans; with room for none it costs nothing.
    pub fn with_capacity(spans: usize) -> Self {
        Self { spans: Vec::with_capacity(spans), dropped: 0 }
    }

    /// Forgets the spans and keeps the room.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.dropped = 0;
    }

    /// Whether it has no room at all.
    pub(crate) fn is_off(&self) -> bool {
        self.spans.capacity() == 0
    }

    pub(crate) fn push(&mut self, span: Span) {
        // Growing would be an allocation in the middle of a step.
        if self.spans.len() < self.spans.capacity() {
            self.spans.push(span);
        } else {
            self.dropped += 1;
        }
    }

    /// The spans, in the order in which their chunks were finished.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Spans that found no room.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// The trace as events that `chrome://tracing` and Perfetto open: a row for each stage, times in microseconds.
    pub fn chrome_events(&self) -> Vec<ChromeEvent> {
        self.spans
            .iter()
            .map(|span| ChromeEvent {
                name: format!("chunk {}", span.chunk),
                cat: span.stage,
                ph: "X",
                ts: span.start_ns as f64 / 1e3,
                dur: (span.end_ns - span.start_ns) as f64 / 1e3,
                pid: 0,
                tid: span.stage,
                args: ChromeArgs { slot: span.slot, bytes: span.bytes },
            })
            .collect()
    }
}

/// One complete event of the Chrome trace format.
#[derive(Debug, Clone, Serialize)]
pub struct ChromeEvent {
    name: String,
    cat: Stage,
    ph: &'static str,
    ts: f64,
    dur: f64,
    pid: u32,
    tid: Stage,
    args: ChromeArgs,
}

#[derive(Debug, Clone, Serialize)]
struct ChromeArgs {
    slot: u32,
    bytes: u64,
}
