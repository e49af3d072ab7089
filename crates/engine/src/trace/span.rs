//! What a trace consists of: spans and counters, each of fixed size, with names that are written at the end.

/// What a span shows. It decides the row and the category.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// A forward, a backward or a step, as the caller's thread sees it.
    Pass,
    /// The same as torch's stream ran it.
    StreamPass,
    /// State, or new weights, toward the device.
    Fetch,
    /// An update rule on a chunk.
    Update,
    /// State, or gradients, away from the device.
    Store,
    /// A saved activation away from the device.
    ActivationStore,
    /// A saved activation toward the device.
    ActivationFetch,
    /// Storages that fall asleep.
    Sleep,
    /// Storages that wake.
    Wake,
    /// A checkpoint that is saved.
    Save,
    /// A stall of the caller's thread, or of torch's stream.
    Wait,
}

impl Kind {
    /// The row: its number and its name.
    pub fn row(self) -> (u32, &'static str) {
        match self {
            Self::Pass => (1, "passes"),
            Self::StreamPass => (2, "torch's stream"),
            Self::Fetch => (3, "fetch"),
            Self::Update => (4, "update"),
            Self::Store => (5, "store"),
            Self::ActivationStore => (6, "activations out"),
            Self::ActivationFetch => (7, "activations in"),
            Self::Sleep | Self::Wake => (8, "sleep and wake"),
            Self::Save => (9, "saves"),
            Self::Wait => (10, "waits"),
        }
    }

    /// The category.
    pub fn category(self) -> &'static str {
        match self {
            Self::Pass | Self::StreamPass => "pass",
            Self::Fetch => "fetch",
            Self::Update => "update",
            Self::Store => "store",
            Self::ActivationStore => "activation_store",
            Self::ActivationFetch => "activation_fetch",
            Self::Sleep => "sleep",
            Self::Wake => "wake",
            Self::Save => "save",
            Self::Wait => "wait",
        }
    }

    /// The kind of spans that other code than the engine's may report.
    pub fn named(category: &str) -> Option<Self> {
        [Self::Pass, Self::Fetch, Self::Update, Self::Store, Self::Sleep, Self::Wake, Self::Save, Self::Wait]
            .into_iter()
            .find(|kind| kind.category() == category)
    }
}

/// What a wait was for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A slot of a ring.
    Slot,
    /// Weights that an overlapped step was still updating.
    Weights,
    /// Gradients on their way to the host.
    Gradients,
    /// A save.
    Save,
    /// The copy of an activation.
    Activation,
    /// A sleep or a wake.
    Sleep,
    /// Something else.
    Other,
}

impl Reason {
    const ALL: [Self; 7] =
        [Self::Slot, Self::Weights, Self::Gradients, Self::Save, Self::Activation, Self::Sleep, Self::Other];

    /// The word in the file.
    pub fn word(self) -> &'static str {
        match self {
            Self::Slot => "slot",
            Self::Weights => "weights",
            Self::Gradients => "gradients",
            Self::Save => "save",
            Self::Activation => "activation",
            Self::Sleep => "sleep",
            Self::Other => "other",
        }
    }

    /// The reason with this word.
    pub fn named(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| reason.word() == word)
    }
}

/// A span's name, made into text when the file is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Label {
    /// `chunk 12`, or `chunks 3 to 7`.
    Chunk,
    /// The same with what was done to it.
    ChunkAnd(&'static str),
    /// The name of the layer.
    Layer,
    /// `batch 2`; the number is the span's `chunk`.
    Batch,
    /// These words.
    Words(&'static str),
    /// A name that the recorder was given, by its number.
    Given(u32),
}

/// One timed interval. Times are nanoseconds since the trace began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// What it shows.
    pub kind: Kind,
    /// What it is called.
    pub label: Label,
    /// When it began.
    pub start_ns: u64,
    /// When it ended.
    pub end_ns: u64,
    /// Bytes that moved or were updated; 0 where that means nothing.
    pub bytes: u64,
    /// Bytes that moved the same way since the span before and were not timed.
    pub untimed_bytes: u64,
    /// Whose it is: see [`owner`](super::owner). 0 is nobody.
    pub owner: u32,
    /// The first chunk, or the batch.
    pub chunk: Option<u32>,
    /// How many chunks.
    pub chunks: u32,
    /// The slot of the ring.
    pub slot: Option<u32>,
    /// The layer, by its number.
    pub layer: Option<u32>,
    /// The step of the trace, from 0.
    pub step: Option<u32>,
    /// What a wait was for.
    pub reason: Option<Reason>,
}

impl Span {
    /// A span without details; its times are set by whoever measures them.
    pub fn new(kind: Kind, label: Label) -> Self {
        Self {
            kind,
            label,
            start_ns: 0,
            end_ns: 0,
            bytes: 0,
            untimed_bytes: 0,
            owner: 0,
            chunk: None,
            chunks: 1,
            slot: None,
            layer: None,
            step: None,
            reason: None,
        }
    }
}

/// What a counter counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counter {
    /// Pinned bytes of optimizers, activations, sleeps and saves.
    Pinned([u64; 4]),
    /// Bytes of all rings on devices.
    Ring(u64),
    /// Bytes that torch's allocator has given out, and has reserved.
    Device([u64; 2]),
}

/// One entry of the recorder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Record {
    /// An interval.
    Span(Span),
    /// Values at one moment.
    Counter(u64, Counter),
}

impl Record {
    /// When it begins.
    pub fn at_ns(&self) -> u64 {
        match self {
            Self::Span(span) => span.start_ns,
            Self::Counter(at_ns, _) => *at_ns,
        }
    }
}
