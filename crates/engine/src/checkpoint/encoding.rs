//! Encodings: how boxes of f32 tensors are kept in fewer bytes than their numbers have.
//!
//! [Note: encodings]
//! A native checkpoint has state as an optimizer keeps it. Its tensors have their shape and the type F32, as in any other
//! checkpoint; a *box* of one may be encoded. It then has one or two *parts*, each an entry of a file:
//!
//! | encoding | first part | second part |
//! |---|---|---|
//! | `bf16` | a bf16 for each element | |
//! | `8bit` | a code for each element | an f32 scale for each block of elements |
//! | `compact` | the lower 16 bits of each element | a bit for each element, the carries |
//!
//! Elements are in the order of the memory that they were in, which the box says; blocks and bits are counted from the
//! box's first element in that order. What the parts mean is in `forebay_device::update`, in `format` and `master`. A
//! compact master also needs its bf16 weight, another tensor of the same checkpoint.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use forebay_device::update::format::{BLOCK, Code, from_bf16, scale_of, to_bf16};
use forebay_device::update::master::{CARRIES, join, split};
use forebay_device::update::{MASTER, RULES};
use forebay_device::{RuleColumn, StateFormat};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boxes::volume;

/// How a box is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Encoding {
    /// As bf16.
    Bf16,
    /// In 8 bits with a scale for each block.
    Blocks {
        /// Whether numbers may be below zero.
        signed: bool,
    },
    /// As what a bf16 weight lacks of its master.
    Compact,
}

/// What a manifest says about an encoding, so that other programs can decode it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct EncodingRecord {
    /// Its kind.
    pub kind: String,
    /// Elements that share a scale.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
    /// Whether bit 7 of a code is a sign.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed: Option<bool>,
    /// By code (without its sign): the share of the scale that it stands for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shares: Option<Vec<f32>>,
    /// What else it says, which nobody here understands.
    #[serde(flatten)]
    pub others: BTreeMap<String, Value>,
}

const KINDS: [&str; 3] = ["bf16", "8bit", "compact"];

/// What works where this program cannot read an encoding.
const REMEDY: &str = "load it with the forebay that wrote it, or convert it there: forebay convert FROM TO --state f32 \
                      --master f32";

impl Encoding {
    /// All encodings.
    pub const ALL: [Self; 4] =
        [Self::Bf16, Self::Blocks { signed: true }, Self::Blocks { signed: false }, Self::Compact];

    /// The name under which a manifest has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Blocks { signed: true } => "8bit-signed",
            Self::Blocks { signed: false } => "8bit-unsigned",
            Self::Compact => "compact",
        }
    }

    /// The name of its kind, as users write it.
    pub fn kind(self) -> &'static str {
        match self {
            Self::Bf16 => KINDS[0],
            Self::Blocks { .. } => KINDS[1],
            Self::Compact => KINDS[2],
        }
    }

    /// What a manifest says about it.
    pub fn record(self) -> EncodingRecord {
        let kind = self.kind().to_owned();
        match self {
            Self::Blocks { signed } => EncodingRecord {
                kind,
                block: Some(BLOCK.into()),
                signed: Some(signed),
                shares: Some(shares(signed).to_vec()),
                ..EncodingRecord::default()
            },
            Self::Bf16 | Self::Compact => EncodingRecord { kind, ..EncodingRecord::default() },
        }
    }

    /// The encoding that a manifest describes; if it cannot be read here, why.
    pub fn of(record: &EncodingRecord) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|known| {
            known.kind() == record.kind && (known.kind() != "8bit" || known.record().signed == record.signed)
        });
        let Some(found) = found else {
            let signed = if record.kind == "8bit" { " without a word about signs" } else { "" };
            let kinds = KINDS.join(", ");
            return Err(format!("kept as {:?}{signed}, and this forebay reads {kinds}; {REMEDY}", record.kind));
        };
        let known = found.record();
        if let Some(name) = record.others.keys().next() {
            return Err(format!("kept as {} with {name:?}, which this forebay does not know; {REMEDY}", found.kind()));
        }
        if record.block != known.block {
            let blocks = record.block.map_or("no blocks".to_owned(), |block| format!("blocks of {block} elements"));
            let ours = known.block.map_or("none".to_owned(), |block| format!("blocks of {block}"));
            return Err(format!("kept as {} in {blocks}, and this forebay reads {ours}; {REMEDY}", found.kind()));
        }
        if record.shares != known.shares {
            let (theirs, ours) = (record.shares.as_deref().unwrap_or(&[]), known.shares.as_deref().unwrap_or(&[]));
            let differs = theirs.iter().zip(ours).position(|(theirs, ours)| theirs.to_bits() != ours.to_bits());
            let what = match differs {
                Some(code) => format!("code {code} is {} instead of {}", theirs[code], ours[code]),
                None => format!("it has {} shares instead of {}", theirs.len(), ours.len()),
            };
            return Err(format!("kept as {} with another table of shares: {what}; {REMEDY}", found.kind()));
        }
        if record.signed != known.signed {
            return Err(format!("kept as {}, which has no sign to speak of; {REMEDY}", found.kind()));
        }
        Ok(found)
    }

    /// The encoding of a column of state in a format of an optimizer; `None` if the column is kept as f32, or if no rule
    /// has such a column.
    pub fn of_column(column: &str, format: &str) -> Option<Self> {
        if column == MASTER.name {
            return (format == KINDS[2]).then_some(Self::Compact);
        }
        let known = RULES.iter().flat_map(|rule| rule.columns).find(|known| known.name == column)?;
        match StateFormat::named(format).ok()? {
            StateFormat::F32 => None,
            StateFormat::Bf16 => Some(Self::Bf16),
            StateFormat::Blocks => Some(Self::Blocks { signed: known.signed }),
        }
    }

    /// The encoding that a manifest has under this name, if it is one of ours.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|known| known.name() == name)
    }

    /// The types and shapes of its parts, for a box of this shape in the order of its memory.
    pub fn parts(self, shape: &[u64]) -> Vec<(&'static str, Vec<u64>)> {
        let elements = volume(shape).unwrap_or(0);
        let beside = |dtype| (dtype, vec![elements.div_ceil(self.granule())]);
        match self {
            Self::Bf16 => vec![("BF16", shape.to_vec())],
            Self::Blocks { .. } => vec![("U8", shape.to_vec()), beside("F32")],
            Self::Compact => vec![("U16", shape.to_vec()), beside("U8")],
        }
    }

    /// What the names of its parts end with, in the files.
    pub fn suffixes(self) -> &'static [&'static str] {
        match self {
            Self::Bf16 => &[""],
            Self::Blocks { .. } => &[":codes", ":scales"],
            Self::Compact => &[":low", ":carry"],
        }
    }

    /// Elements for each value of the second part; encoding a part of a box begins at a multiple.
    pub(super) fn granule(self) -> u64 {
        match self {
            Self::Bf16 => 1,
            Self::Blocks { .. } => BLOCK.into(),
            Self::Compact => CARRIES.into(),
        }
    }

    /// Bytes of one value of the first part, and of the second.
    pub(super) fn widths(self) -> (u64, u64) {
        match self {
            Self::Bf16 => (2, 0),
            Self::Blocks { .. } => (1, 4),
            Self::Compact => (2, 1),
        }
    }

    /// Appends numbers as little-endian f32. `numbers` are values of the first part, the first of which is element
    /// `first` of the box; `beside` has values of the second part from the one of element `origin` on; `weights` are the
    /// bf16 weights of a compact master.
    pub(super) fn decode(self, numbers: &[u8], first: u64, beside: (&[u8], u64), weights: &[u8], to: &mut Vec<u8>) {
        let half = |bytes: &[u8], i: usize| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]);
        let (beside, origin) = beside;
        let granule = self.granule();
        match self {
            Self::Bf16 => {
                let wide = |i| from_bf16(half(numbers, i)).to_le_bytes();
                to.extend((0..numbers.len() / 2).flat_map(wide));
            }
            Self::Blocks { signed } => {
                let shares = shares_of_codes(signed);
                let mut done = 0;
                while done < numbers.len() {
                    let at = first + done as u64;
                    let end = numbers.len().min(done + (granule - at % granule) as usize);
                    let place = 4 * (at / granule - origin / granule) as usize;
                    let scale =
                        f32::from_le_bytes([beside[place], beside[place + 1], beside[place + 2], beside[place + 3]]);
                    to.extend(
                        numbers[done..end].iter().flat_map(|&code| (shares[code as usize] * scale).to_le_bytes()),
                    );
                    done = end;
                }
            }
            Self::Compact => {
                let start = origin / granule * granule;
                to.extend((0..numbers.len() / 2).flat_map(|i| {
                    let bit = first + i as u64 - start;
                    let carry = beside[(bit / 8) as usize] >> (bit % 8) & 1 != 0;
                    join(half(weights, i), half(numbers, i), carry).to_le_bytes()
                }));
            }
        }
    }

    /// Appends what is kept of these numbers, which begin a block: the first part, and the second. `weights` are the bf16
    /// weights of a compact master: where the rounding of the master is not the weight, the weight is the master, as it
    /// is for an optimizer.
    pub(super) fn encode(self, values: &[f32], weights: &[u8], numbers: &mut Vec<u8>, beside: &mut Vec<u8>) {
        match self {
            Self::Bf16 => numbers.extend(values.iter().flat_map(|&value| to_bf16(value).to_le_bytes())),
            Self::Blocks { signed } => {
                let code = code(signed);
                for block in values.chunks(BLOCK as usize) {
                    let largest = block.iter().fold(0, |largest: u32, value| largest.max(value.to_bits() << 1 >> 1));
                    let (scale, inverse) = scale_of(largest);
                    numbers.extend(block.iter().map(|&value| code.nearest(value, inverse, None)));
                    beside.extend(scale.to_le_bytes());
                }
            }
            Self::Compact => {
                let eights = values.chunks(CARRIES as usize).zip(weights.chunks(2 * CARRIES as usize));
                for (values, weights) in eights {
                    let mut carries = 0;
                    for (i, (&value, weight)) in values.iter().zip(weights.chunks(2)).enumerate() {
                        let is_master = to_bf16(value).to_le_bytes() == weight;
                        let (low, carry) = if is_master { split(value) } else { (0, false) };
                        numbers.extend(low.to_le_bytes());
                        carries |= u8::from(carry) << i;
                    }
                    beside.push(carries);
                }
            }
        }
    }
}

fn code(signed: bool) -> Code {
    if signed { RuleColumn::signed("", "").code() } else { RuleColumn::unsigned("", "").code() }
}

/// The share of each code of 8 bits, its sign included.
fn shares_of_codes(signed: bool) -> &'static [f32; 256] {
    static TABLES: LazyLock<[[f32; 256]; 2]> =
        LazyLock::new(|| [false, true].map(|signed| std::array::from_fn(|i| code(signed).share(i as u8))));
    &TABLES[usize::from(signed)]
}

/// The table that a manifest has: of codes without their sign.
fn shares(signed: bool) -> &'static [f32] {
    &shares_of_codes(signed)[..if signed { 128 } else { 256 }]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        let mix = |i: usize| (i as u32 + 1).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
        (0..n)
            .map(|i| (f64::from(mix(i) >> 8) / f64::from(1 << 24) - 0.5) as f32 * 10f32.powi(mix(i) as i32 % 4))
            .collect()
    }

    fn decoded(encoding: Encoding, numbers: &[u8], first: u64, beside: (&[u8], u64), weights: &[u8]) -> Vec<f32> {
        let mut bytes = Vec::new();
        encoding.decode(numbers, first, beside, weights, &mut bytes);
        bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    /// What is kept of what was kept is the same, a box has the values of its elements, and any range of it does.
    #[test]
    fn ranges_decode_as_the_whole_and_encode_to_the_same() {
        for encoding in Encoding::ALL {
            for n in [1usize, 7, 8, 255, 256, 257, 1000] {
                let mut values = numbers(n, 3);
                if encoding == (Encoding::Blocks { signed: false }) {
                    values.iter_mut().for_each(|value| *value = value.abs());
                }
                let weights: Vec<u8> = values.iter().flat_map(|&value| to_bf16(value).to_le_bytes()).collect();
                let (mut first, mut second) = (Vec::new(), Vec::new());
                encoding.encode(&values, &weights, &mut first, &mut second);
                let parts = encoding.parts(&[n as u64]);
                let (width, wide) = encoding.widths();
                assert_eq!(first.len() as u64, parts[0].1[0] * width, "{encoding:?}");
                assert_eq!(second.len() as u64, parts.get(1).map_or(0, |(_, shape)| shape[0] * wide), "{encoding:?}");
                let whole = decoded(encoding, &first, 0, (&second, 0), &weights);
                match encoding {
                    Encoding::Compact => assert_eq!(whole, values),
                    _ => {
                        // The smallest codes are far apart.
                        let least =
                            values.iter().fold(0f32, |largest, value| largest.max(value.abs())) / (1 << 20) as f32;
                        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= b.abs() / 7.0 || b.abs() < 64.0 * least;
                        assert!(whole.iter().zip(&values).all(near), "{whole:?} {values:?}");
                    }
                }
                let (mut again, mut beside) = (Vec::new(), Vec::new());
                encoding.encode(&whole, &weights, &mut again, &mut beside);
                assert_eq!((again, beside), (first.clone(), second.clone()), "{encoding:?} {n}");
                for (from, to) in [(0, n), (n / 2, n), (n / 3, n / 2 + 1), (n - 1, n)] {
                    let width = width as usize;
                    let granule = encoding.granule() as usize;
                    let place = from / granule * wide as usize;
                    let weights = weights.get(2 * from..2 * to).unwrap();
                    let beside = (&second[place.min(second.len())..], from as u64);
                    let part = decoded(encoding, &first[width * from..width * to], from as u64, beside, weights);
                    assert_eq!(part, whole[from..to], "{encoding:?} {n} {from} {to}");
                }
            }
        }
    }

    /// Where a master is no master of its weight, an optimizer takes the weight.
    #[test]
    fn a_master_of_another_weight_is_its_weight() {
        let (mut low, mut carry) = (Vec::new(), Vec::new());
        let weights: Vec<u8> = [1.0f32, 2.0].iter().flat_map(|&weight| to_bf16(weight).to_le_bytes()).collect();
        Encoding::Compact.encode(&[1.001, 7.7], &weights, &mut low, &mut carry);
        assert_eq!(decoded(Encoding::Compact, &low, 0, (&carry, 0), &weights), [1.001, 2.0]);
    }

    #[test]
    fn columns_have_the_encodings_of_their_formats() {
        let of = |column, format| Encoding::of_column(column, format);
        assert_eq!(of("exp_avg", "8bit"), Some(Encoding::Blocks { signed: true }));
        assert_eq!(of("max_exp_avg_sq", "8bit"), Some(Encoding::Blocks { signed: false }));
        assert_eq!((of("momentum_buffer", "bf16"), of("exp_avg", "f32")), (Some(Encoding::Bf16), None));
        assert_eq!((of("master_param", "compact"), of("master_param", "f32")), (Some(Encoding::Compact), None));
        assert_eq!((of("another", "8bit"), of("exp_avg", "another")), (None, None));
    }

    #[test]
    fn records_are_read_or_refused_by_name() {
        for encoding in Encoding::ALL {
            assert_eq!(Encoding::of(&encoding.record()), Ok(encoding));
            let text = serde_json::to_string(&encoding.record()).unwrap();
            assert_eq!(serde_json::from_str::<EncodingRecord>(&text).unwrap(), encoding.record());
        }
        type Edit = fn(&mut EncodingRecord);
        let cases: &[(Encoding, Edit, &str)] = &[
            (Encoding::Bf16, |r| r.kind = "fp4".into(), "kept as \"fp4\", and this forebay reads bf16, 8bit, compact"),
            (Encoding::Bf16, |r| r.block = Some(2), "kept as bf16 in blocks of 2 elements"),
            (Encoding::Bf16, |r| r.signed = Some(true), "kept as bf16, which has no sign"),
            (Encoding::Compact, |r| drop(r.others.insert("bits".into(), 12.into())), "compact with \"bits\""),
            (
                Encoding::Blocks { signed: true },
                |r| r.block = Some(128),
                "blocks of 128 elements, and this forebay reads blocks of 256",
            ),
            (Encoding::Blocks { signed: true }, |r| r.block = None, "8bit in no blocks"),
            (Encoding::Blocks { signed: true }, |r| r.signed = None, "without a word about signs"),
            (Encoding::Blocks { signed: true }, |r| r.signed = Some(false), "another table"),
            (Encoding::Blocks { signed: false }, |r| r.shares = None, "it has 0 shares instead of 256"),
            (Encoding::Blocks { signed: false }, |r| r.shares.as_mut().unwrap().truncate(255), "255 shares"),
            (
                Encoding::Blocks { signed: true },
                |r| r.shares.as_mut().unwrap()[127] = 0.5,
                "code 127 is 0.5 instead of 1",
            ),
        ];
        for (encoding, edit, reason) in cases {
            let mut record = encoding.record();
            edit(&mut record);
            let complaint = Encoding::of(&record).expect_err(reason);
            assert!(complaint.contains(reason) && complaint.contains("forebay convert"), "{complaint}");
        }
    }
}
