//! The trace as Python sees it. What is recorded, and how the file looks, is in `forebay::trace`.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Seek as _, Write as _};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use forebay::Error;
use forebay::device::{SharedDevice, open};
use forebay::trace::{
    About, Counter, Kind, Label, Reason, Recorder, Recording, Span, Timed, TraceOptions, start, timed_on,
};
use pyo3::prelude::*;

use crate::accelerator::Unlocked;
use crate::guard;
use crate::torch;

/// A trace of this process while it is recorded, and its file.
#[pyclass(frozen)]
pub(crate) struct Trace {
    recorder: Unlocked<Arc<Recorder>>,
    file: Mutex<Option<File>>,
    path: PathBuf,
    pid: u32,
}

/// Work on torch's stream that is being submitted.
#[pyclass(frozen)]
pub(crate) struct TracedWork {
    timed: Unlocked<Mutex<Option<Timed>>>,
    device: SharedDevice,
    span: Span,
}

fn refused(path: &std::path::Path, error: &std::io::Error) -> Error {
    let (errno, text) = (error.raw_os_error(), error.to_string());
    Error::File { action: "write", path: path.display().to_string(), errno, text }
}

impl Trace {
    fn label(&self, name: &str) -> Label {
        const KNOWN: [&str; 6] = ["forward", "backward", "step", "forward without gradients", "save", "async save"];
        let known = KNOWN.into_iter().find(|known| *known == name);
        known.map_or_else(|| Label::Given(self.recorder.give(name)), Label::Words)
    }
}

#[pymethods]
impl Trace {
    /// Begin a trace. The file is opened now, and written by `finish`; what is in it until then stays.
    #[new]
    fn new(py: Python<'_>, path: PathBuf, capacity: usize) -> PyResult<Self> {
        guard::run(py, || {
            let recorder = start(TraceOptions { capacity })?;
            match OpenOptions::new().create(true).truncate(false).write(true).open(&path) {
                Ok(file) => {
                    let (recorder, file) = (Unlocked::new(recorder), Mutex::new(Some(file)));
                    Ok(Self { recorder, file, path, pid: std::process::id() })
                }
                Err(error) => {
                    recorder.stop();
                    Err(refused(&path, &error))
                }
            }
        })
    }

    /// Nanoseconds since it began.
    fn now_ns(&self) -> u64 {
        self.recorder.now_ns()
    }

    /// Records that were dropped so far.
    fn dropped(&self) -> u64 {
        self.recorder.dropped()
    }

    /// Add a span. `category` is one of the file's, and `owner` a number that `trace_owner` of something returned.
    #[pyo3(signature = (category, name, start_ns, end_ns, *, size=0, owner=0, reason=None, step=None))]
    #[expect(clippy::too_many_arguments, reason = "parts of one span")]
    fn span(
        &self,
        category: &str,
        name: &str,
        start_ns: u64,
        end_ns: u64,
        size: u64,
        owner: u32,
        reason: Option<&str>,
        step: Option<u32>,
    ) {
        let Some(kind) = Kind::named(category) else { return };
        let (label, reason) = (self.label(name), reason.and_then(Reason::named));
        let span = Span { start_ns, end_ns, bytes: size, owner, reason, step, ..Span::new(kind, label) };
        self.recorder.push(span);
    }

    /// Begin a pass as torch's stream runs it; nothing where the device has no times.
    fn begin_on_stream(
        &self,
        py: Python<'_>,
        device: &str,
        stream: u64,
        name: &str,
        step: u32,
    ) -> PyResult<Option<TracedWork>> {
        guard::run(py, || {
            let device = open(device)?;
            let Some(on) = torch::stream_of(&device, stream)? else { return Ok(None) };
            let timed = timed_on(&self.recorder, &device, &on);
            let span = Span { step: Some(step), ..Span::new(Kind::StreamPass, self.label(name)) };
            Ok(timed.map(|timed| TracedWork { timed: Unlocked::new(Mutex::new(Some(timed))), device, span }))
        })
    }

    /// Add a counter of torch's memory on the device.
    fn count_device(&self, allocated: u64, reserved: u64) {
        self.recorder.count(Counter::Device([allocated, reserved]));
    }

    /// End the trace and write its file. `owners` and `layers` have the names of what reported; `others` is JSON of what
    /// else the file says. In a forked child it does nothing.
    fn finish(
        &self,
        py: Python<'_>,
        rank: u32,
        ranks: u32,
        owners: Vec<(u32, String)>,
        layers: Vec<(u32, u32, String)>,
        others: &str,
    ) -> PyResult<()> {
        guard::run(py, || {
            let Some(mut file) = self.file.lock().unwrap_or_else(PoisonError::into_inner).take() else { return Ok(()) };
            if self.pid != std::process::id() {
                return Ok(());
            }
            let recording: Recording = self.recorder.stop();
            let others = serde_json::from_str(others).map_err(|error| Error::InvalidOption {
                option: "trace",
                value: "its description".to_owned(),
                remedy: error.to_string(),
            })?;
            let owners = owners.into_iter().collect();
            let layers = layers.into_iter().map(|(owner, layer, name)| ((owner, layer), name)).collect();
            let about = About { rank, ranks, owners, layers, others };
            let mut write = || {
                file.rewind()?;
                let mut to = BufWriter::new(&file);
                recording.write(&mut to, &about)?;
                to.flush()?;
                drop(to);
                let end = file.stream_position()?;
                file.set_len(end)
            };
            write().map_err(|error| refused(&self.path, &error))
        })
    }
}

#[pymethods]
impl TracedWork {
    /// All of it was submitted.
    fn end(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        guard::run(py, || {
            let timed = self.timed.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let (Some(timed), Some(on)) = (timed, torch::stream_of(&self.device, stream)?) {
                timed.end(&on, self.span);
            }
            Ok(())
        })
    }
}
