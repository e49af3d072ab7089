//! Columns of a rule that are kept in fewer bits than f32, as f32 and back, in host memory.

use std::sync::Arc;

use forebay::device::update::format::scale_of;
use forebay::device::{Error, Region, RuleColumn, StateFormat, open};

use crate::torch::{self, Keeper};

/// Elements that share a scale.
const BLOCK: usize = forebay::device::update::BLOCK as usize;

/// A column's memory, which the caller holds.
fn regions(column: &RuleColumn, format: StateFormat, parts: &[u64], elements: u64) -> forebay::Result<Vec<Region>> {
    let columns = column.kept_as(format);
    if parts.len() != columns.len() {
        let reason = format!("{} addresses for {} parts of {}", parts.len(), columns.len(), column.name);
        return Err(Error::BadOperands { operation: "convert state", reason }.into());
    }
    let keeper: Keeper = Arc::new(());
    let region =
        |(column, addr): (&forebay::device::Column, &u64)| torch::host_region(*addr, column.bytes(elements), &keeper);
    columns.iter().zip(parts).map(region).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Writes the numbers of a column as f32. Nobody may write to any of this memory meanwhile.
pub(crate) fn numbers_of(
    column: &RuleColumn,
    format: StateFormat,
    parts: &[u64],
    numbers: u64,
    elements: u64,
) -> forebay::Result<()> {
    let (cpu, parts) = (open("cpu")?, regions(column, format, parts, elements)?);
    let kept = parts.iter().map(|part| {
        let mut bytes = vec![0; part.bytes() as usize];
        cpu.read(part, &mut bytes).map(|()| bytes)
    });
    let kept = kept.collect::<Result<Vec<_>, _>>()?;
    let found: Vec<f32> = match format {
        StateFormat::F32 => f32s(&kept[0]),
        StateFormat::Bf16 => {
            kept[0].chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
        }
        StateFormat::Blocks => {
            let (code, scales) = (column.code(), f32s(&kept[1]));
            kept[0].iter().enumerate().map(|(i, kept)| code.share(*kept) * scales[i / BLOCK]).collect()
        }
    };
    let bytes: Vec<u8> = found.into_iter().flat_map(f32::to_le_bytes).collect();
    Ok(cpu.write(&bytes, &torch::host_region(numbers, 4 * elements, &(Arc::new(()) as Keeper))?)?)
}

/// Keeps these f32 numbers in a column, rounded to nearest. Nobody may use this memory meanwhile.
pub(crate) fn keep_numbers(
    column: &RuleColumn,
    format: StateFormat,
    numbers: u64,
    parts: &[u64],
    elements: u64,
) -> forebay::Result<()> {
    let (cpu, parts) = (open("cpu")?, regions(column, format, parts, elements)?);
    let mut bytes = vec![0; 4 * elements as usize];
    cpu.read(&torch::host_region(numbers, 4 * elements, &(Arc::new(()) as Keeper))?, &mut bytes)?;
    let numbers = f32s(&bytes);
    let kept: Vec<Vec<u8>> = match format {
        StateFormat::F32 => vec![bytes],
        StateFormat::Bf16 => vec![numbers.iter().flat_map(|number| bf16(*number).to_le_bytes()).collect()],
        StateFormat::Blocks => {
            let (code, mut codes, mut scales) = (column.code(), Vec::with_capacity(numbers.len()), Vec::new());
            for block in numbers.chunks(BLOCK) {
                let largest = block.iter().map(|number| number.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
                let (scale, inverse) = scale_of(largest);
                codes.extend(block.iter().map(|number| code.nearest(*number, inverse, None)));
                scales.extend(scale.to_le_bytes());
            }
            vec![codes, scales]
        }
    };
    for (part, bytes) in parts.iter().zip(&kept) {
        cpu.write(bytes, part)?;
    }
    Ok(())
}

/// The nearest bf16, the even one of two; one NaN for all.
fn bf16(number: f32) -> u16 {
    let bits = number.to_bits();
    if number.is_nan() { 0x7fff } else { ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16 }
}
