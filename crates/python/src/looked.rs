//! Addresses, types and sizes of many tensors, kept in Rust: read once in a step, never turned into lists of Python
//! numbers.

use forebay::device::Dtype;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::torch::ExchangeApi;

/// One tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Row {
    /// The address of its first element: 1 for an empty tensor, 0 where there is no tensor.
    pub(crate) addr: u64,
    /// How many elements it has.
    pub(crate) elements: u64,
    /// The number of its GPU; -1 for the host.
    pub(crate) device: i32,
    /// The type of its elements.
    pub(crate) dtype: Dtype,
}

/// What a look at many tensors found.
#[pyclass(frozen)]
pub(crate) struct Looked {
    rows: Vec<Row>,
    contiguous: bool,
}

impl Looked {
    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    fn with_capacity(count: usize) -> Self {
        Self { rows: Vec::with_capacity(count), contiguous: true }
    }

    fn push(&mut self, (row, contiguous): (Row, bool)) {
        self.rows.push(row);
        self.contiguous &= contiguous;
    }
}

fn dtype(code: u8) -> PyResult<Dtype> {
    match code {
        0 => Ok(Dtype::F32),
        1 => Ok(Dtype::Bf16),
        2 => Ok(Dtype::F16),
        _ => Err(PyValueError::new_err(format!("a type has number {code}; f32 is 0, bf16 1, f16 2"))),
    }
}

fn code(dtype: Dtype) -> u8 {
    match dtype {
        Dtype::F32 => 0,
        Dtype::Bf16 => 1,
        Dtype::F16 => 2,
    }
}

#[pymethods]
impl Looked {
    /// The same from lists, all of one length. Types are 0 for f32, 1 for bf16, 2 for f16; address 0 is no tensor.
    #[new]
    fn new(
        addresses: Vec<u64>,
        dtypes: Vec<u8>,
        devices: Vec<i32>,
        elements: Vec<u64>,
        contiguous: bool,
    ) -> PyResult<Self> {
        let count = addresses.len();
        if dtypes.len() != count || devices.len() != count || elements.len() != count {
            return Err(PyValueError::new_err("lists of different lengths"));
        }
        let row = |i: usize| {
            Ok(Row { addr: addresses[i], elements: elements[i], device: devices[i], dtype: dtype(dtypes[i])? })
        };
        Ok(Self { rows: (0..count).map(row).collect::<PyResult<_>>()?, contiguous })
    }

    /// Whether every one is contiguous.
    #[getter]
    fn contiguous(&self) -> bool {
        self.contiguous
    }

    /// The address of each.
    #[getter]
    fn addresses(&self) -> Vec<u64> {
        self.rows.iter().map(|row| row.addr).collect()
    }

    /// The number of each one's type.
    #[getter]
    fn dtypes(&self) -> Vec<u8> {
        self.rows.iter().map(|row| code(row.dtype)).collect()
    }

    /// The number of each one's device, -1 for the host.
    #[getter]
    fn devices(&self) -> Vec<i32> {
        self.rows.iter().map(|row| row.device).collect()
    }

    /// The elements of each.
    #[getter]
    fn elements(&self) -> Vec<u64> {
        self.rows.iter().map(|row| row.elements).collect()
    }

    /// These at other places of a longer list, with no tensor at the rest: `places` has old and new place of each.
    fn spread(&self, places: Vec<(usize, usize)>, count: usize) -> Self {
        let mut rows = vec![Row { addr: 0, elements: 0, device: -1, dtype: Dtype::F32 }; count];
        for (old, new) in places {
            rows[new] = self.rows[old];
        }
        Self { rows, contiguous: self.contiguous }
    }

    /// Whether these are at the addresses of those, one by one.
    fn same_memory(&self, other: &Self) -> bool {
        self.rows.len() == other.rows.len()
            && self.rows.iter().zip(&other.rows).all(|(row, other)| row.addr == other.addr)
    }

    /// Whether each is on the device of its counterpart and has as many elements.
    fn fits(&self, other: &Self) -> bool {
        let fit = |row: &Row, other: &Row| row.device == other.device && row.elements == other.elements;
        self.rows.len() == other.rows.len() && self.rows.iter().zip(&other.rows).all(|(row, other)| fit(row, other))
    }

    /// Whether each is on this device or on the host.
    fn reachable(&self, device: i32) -> bool {
        self.rows.iter().all(|row| row.device == device || row.device == -1)
    }

    /// The places of two that share memory, if there are such. These are not gone through where they are the ones that
    /// are known to be apart.
    fn overlap(&self, apart: Option<&Bound<'_, Self>>) -> Option<(usize, usize)> {
        if apart.is_some_and(|apart| apart.get().rows == self.rows) {
            return None;
        }
        let filled = self.rows.iter().enumerate().filter(|(_, row)| row.elements > 0);
        let mut ranges: Vec<_> = filled
            .map(|(place, row)| (row.device, row.addr, row.addr + row.elements * row.dtype.bytes(), place))
            .collect();
        // In the order of their first bytes, neighbours overlap where any do.
        ranges.sort_unstable();
        let found = ranges.windows(2).find(|pair| pair[0].0 == pair[1].0 && pair[1].1 < pair[0].2)?;
        Some((found[0].3.min(found[1].3), found[0].3.max(found[1].3)))
    }

    /// Whether one has a single element.
    fn has_single(&self) -> bool {
        self.rows.iter().any(|row| row.elements == 1)
    }
}

/// Look at torch's tensors through the table that `torch.Tensor.__dlpack_c_exchange_api__` names: one call for each
/// tensor instead of five from Python. Nothing where the table or a tensor is not as expected: then Python looks itself.
/// `plain` are the types of which a tensor may be.
#[pyfunction]
pub(crate) fn look(
    tensors: &Bound<'_, PyAny>,
    table: &Bound<'_, PyAny>,
    plain: (Bound<'_, PyAny>, Bound<'_, PyAny>),
) -> PyResult<Option<Looked>> {
    let tensors = tensors.cast::<PyList>()?;
    let Some(table) = ExchangeApi::new(table, plain)? else { return Ok(None) };
    let mut found = Looked::with_capacity(tensors.len());
    for tensor in tensors {
        let Some(looked) = table.describe(&tensor) else { return Ok(None) };
        found.push(looked);
    }
    Ok(Some(found))
}

/// A list of gradients, the places of their parameters unless all have one, and what `look` finds for both.
type WithGradients<'py> = (Bound<'py, PyAny>, Option<Vec<usize>>, Looked, Looked);

/// Look at the parameters that have a gradient, and at their gradients, in one go. Returns the gradients, the places of
/// these parameters in the list (nothing where they are all of it), and what `look` finds for both.
#[pyfunction]
pub(crate) fn look_with_gradients<'py>(
    parameters: &Bound<'py, PyAny>,
    table: &Bound<'py, PyAny>,
    plain: (Bound<'py, PyAny>, Bound<'py, PyAny>),
) -> PyResult<Option<WithGradients<'py>>> {
    let (py, parameters) = (parameters.py(), parameters.cast::<PyList>()?);
    let Some(table) = ExchangeApi::new(table, plain)? else { return Ok(None) };
    let count = parameters.len();
    let (mut found, mut found_gradients) = (Looked::with_capacity(count), Looked::with_capacity(count));
    let (mut gradients, mut kept) = (Vec::with_capacity(count), Vec::with_capacity(count));
    for (place, parameter) in parameters.iter().enumerate() {
        // The type first: the gradient of another kind of tensor may be anything.
        if !table.is_plain(&parameter) {
            return Ok(None);
        }
        let gradient = parameter.getattr(pyo3::intern!(py, "grad"))?;
        if gradient.is_none() {
            continue;
        }
        let (looked, looked_gradient) = (table.describe(&parameter), table.describe(&gradient));
        let (Some(looked), Some(looked_gradient)) = (looked, looked_gradient) else { return Ok(None) };
        found.push(looked);
        found_gradients.push(looked_gradient);
        gradients.push(gradient);
        kept.push(place);
    }
    let kept = (kept.len() < count).then_some(kept);
    Ok(Some((PyList::new(py, gradients)?.into_any(), kept, found, found_gradients)))
}
