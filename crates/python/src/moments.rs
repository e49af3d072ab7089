//! Columns of a rule that are kept in fewer bits than f32, as f32 and back, in host memory.

use std::sync::Arc;

use forebay::device::update::format;
use forebay::device::{Error, Moment, Region, RuleColumn, StateFormat};

use crate::torch::{self, Keeper};

/// A region of the caller's, who holds its memory.
fn region(address: u64, bytes: u64) -> forebay::Result<Region> {
    let keeper: Keeper = Arc::new(());
    torch::host_region(address, bytes, &keeper)
}

/// A column's memory: an address for each of its parts.
fn moment(column: &RuleColumn, format: StateFormat, parts: &[u64], elements: u64) -> forebay::Result<Moment> {
    let columns = column.kept_as(format);
    if parts.len() != columns.len() {
        let reason = format!("{} addresses for {} parts of {}", parts.len(), columns.len(), column.name);
        return Err(Error::BadOperands { operation: "convert state", reason }.into());
    }
    let part = |i: usize| region(parts[i], columns[i].bytes(elements));
    Ok(match format {
        StateFormat::F32 => Moment::F32(part(0)?),
        StateFormat::Bf16 => Moment::Bf16(part(0)?),
        StateFormat::Blocks => Moment::Blocks { codes: part(0)?, scales: part(1)? },
    })
}

/// Writes the numbers of a column as f32. Nobody may write to any of this memory meanwhile.
pub(crate) fn numbers_of(
    column: &RuleColumn,
    format: StateFormat,
    parts: &[u64],
    numbers: u64,
    elements: u64,
) -> forebay::Result<()> {
    let kept = moment(column, format, parts, elements)?;
    Ok(format::numbers_of(column, &kept, &region(numbers, 4 * elements)?)?)
}

/// Keeps these f32 numbers in a column, rounded to nearest. Nobody may use this memory meanwhile.
pub(crate) fn keep_numbers(
    column: &RuleColumn,
    format: StateFormat,
    numbers: u64,
    parts: &[u64],
    elements: u64,
) -> forebay::Result<()> {
    let kept = moment(column, format, parts, elements)?;
    Ok(format::keep_numbers(column, &region(numbers, 4 * elements)?, &kept)?)
}
