//! The manifest: what a checkpoint consists of, checked as a whole before anything of it is used.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boxes::{TensorBox, check_cover, volume};
use super::encoding::{Encoding, EncodingRecord};
use super::{dense_bytes, element_bytes, refuse};
use crate::error::Result;

/// The beginning of the text, followed at once by the checksum's eight digits, for each version of the format. What has no
/// encodings is of version 1, so that every forebay reads it.
const HEADS: [&str; 2] = ["{\"forebay_checkpoint\":1,\"crc32\":\"", "{\"forebay_checkpoint\":2,\"crc32\":\""];
const HEAD_BYTES: usize = HEADS[0].len();
const AFTER_DIGITS: &str = "\",";
const PREFIX_BYTES: usize = HEAD_BYTES + 8 + AFTER_DIGITS.len();
/// Limits of what a manifest may say; far above anything real.
const MAX_DIMS: usize = 64;
const MAX_BLOCK_BYTES: u64 = 1 << 30;
const MAX_FILE_BYTES: u64 = 1 << 50;

/// What a checkpoint consists of.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Bytes that one checksum covers.
    pub block_bytes: u64,
    /// The files beside the manifest.
    pub files: Vec<FileRecord>,
    /// The tensors, by name.
    pub tensors: BTreeMap<String, Tensor>,
    /// How boxes may be kept in fewer bytes than their numbers have, by name; empty in version 1.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub encodings: BTreeMap<String, EncodingRecord>,
    /// Values that are no tensors, by name.
    #[serde(default)]
    pub objects: BTreeMap<String, Value>,
    /// For each name, the keys and list positions under which its value stood in the nested state.
    #[serde(default)]
    pub paths: BTreeMap<String, Vec<Value>>,
    /// Who wrote it, for people.
    #[serde(default)]
    pub made_by: BTreeMap<String, String>,
}

/// One safetensors file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Its name, in the manifest's folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// The CRC-32 of each block.
    pub blocks: Vec<u32>,
}

/// One tensor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Its type, as safetensors names them.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// The boxes that make it up.
    pub chunks: Vec<StoredChunk>,
    /// The tensor whose compact masters it has: a bf16 weight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<String>,
}

/// A box of a tensor and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredChunk {
    /// Which part of the tensor it is.
    #[serde(flatten)]
    pub extent: TensorBox,
    /// The file that holds it, as a position in the manifest's list.
    pub file: usize,
    /// Where its bytes begin in the file.
    pub begin: u64,
    /// Where they end.
    pub end: u64,
    /// How it is kept, by its name in the manifest; by default as its numbers are, row by row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encoding: Option<String>,
    /// If it is encoded, its dimensions in the order of its memory, the outermost first; by default row by row.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<Vec<usize>>,
    /// The second part of an encoding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<FileRange>,
}

/// A range of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRange {
    /// The file, as a position in the manifest's list.
    pub file: usize,
    /// Where it begins.
    pub begin: u64,
    /// Where it ends.
    pub end: u64,
}

/// What a file has of a box: all of it, or one part of its encoding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredPart {
    /// Its type.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<u64>,
    /// Where it is.
    pub place: FileRange,
}

impl StoredChunk {
    /// A box that is kept as its numbers are.
    pub fn plain(extent: TensorBox, file: usize, begin: u64, end: u64) -> Self {
        Self { extent, file, begin, end, encoding: None, order: None, beside: None }
    }

    /// Its dimensions in the order of its memory.
    pub fn order(&self) -> Vec<usize> {
        self.order.clone().unwrap_or_else(|| (0..self.extent.shape.len()).collect())
    }

    /// Its shape in the order of its memory.
    pub fn ordered_shape(&self) -> Vec<u64> {
        self.order().iter().map(|&dim| self.extent.shape[dim]).collect()
    }

    /// The ranges of files that it has.
    pub(super) fn places(&self) -> impl Iterator<Item = FileRange> {
        let first = FileRange { file: self.file, begin: self.begin, end: self.end };
        std::iter::once(first).chain(self.beside.clone())
    }
}

impl Tensor {
    /// Bytes of its numbers.
    pub fn bytes(&self) -> u64 {
        // Checked when the manifest was.
        volume(&self.shape).unwrap_or(0).saturating_mul(element_bytes(&self.dtype).unwrap_or(0))
    }

    /// Bytes that files have of it.
    pub fn stored_bytes(&self) -> u64 {
        self.chunks.iter().flat_map(StoredChunk::places).map(|place| place.end - place.begin).sum()
    }
}

impl Manifest {
    /// Reads a manifest's text and checks all that can be checked without the files. `path` is for errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let digits = &text.get(HEAD_BYTES..HEAD_BYTES + 8).unwrap_or_default();
        let is_sealed = text.len() > PREFIX_BYTES && text[HEAD_BYTES + 8..].starts_with(AFTER_DIGITS.as_bytes());
        let version = HEADS.iter().position(|head| is_sealed && text.starts_with(head.as_bytes()));
        let Some(version) = version.map(|index| index + 1) else {
            let found = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
            return refuse(path, format!("not a manifest of format 1 or 2: it begins with {found:?}"));
        };
        let stated = std::str::from_utf8(digits).unwrap_or_default();
        let rest = &text[PREFIX_BYTES..];
        let found = format!("{:08x}", crc32fast::hash(rest));
        if stated != found {
            return refuse(path, format!("damaged: its checksum is {found}, it states {stated:?}"));
        }
        // What follows the prefix is the inside of an object.
        let body = [b"{", rest].concat();
        let manifest: Self = match serde_json::from_slice(&body) {
            Ok(manifest) => manifest,
            Err(error) => return refuse(path, format!("not a manifest of format {version}: {error}")),
        };
        if manifest.version() != version {
            let what = if version == 1 { "encodings" } else { "no encodings" };
            return refuse(path, format!("a manifest of format {version} with {what}"));
        }
        manifest.check(path)?;
        Ok(manifest)
    }

    /// Its text, with the checksum.
    pub fn encode(&self, path: &Path) -> Result<Vec<u8>> {
        let body = match serde_json::to_vec(self) {
            Ok(body) => body,
            Err(error) => return refuse(path, format!("its values cannot be written: {error}")),
        };
        let rest = &body[1..];
        let head = HEADS[self.version() - 1];
        Ok([format!("{head}{:08x}{AFTER_DIGITS}", crc32fast::hash(rest)).as_bytes(), rest].concat())
    }

    /// The version of the format that it needs.
    fn version(&self) -> usize {
        if self.encodings.is_empty() { 1 } else { 2 }
    }

    /// Bytes that files have of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(Tensor::stored_bytes).fold(0, u64::saturating_add)
    }

    /// How a box of it is kept; if that cannot be read here, why.
    pub fn encoding(&self, chunk: &StoredChunk) -> std::result::Result<Option<Encoding>, String> {
        let Some(name) = &chunk.encoding else { return Ok(None) };
        let record = self.encodings.get(name).ok_or_else(|| format!("kept as {name:?}, which is not described"))?;
        Encoding::of(record).map(Some)
    }

    /// What files have of a box: all of it, or the parts of its encoding. None if they do not fit the encoding.
    pub fn parts(&self, tensor: &Tensor, chunk: &StoredChunk) -> Option<Vec<StoredPart>> {
        let described = match self.encoding(chunk).ok()? {
            None => vec![(tensor.dtype.as_str(), chunk.extent.shape.clone())],
            Some(encoding) => encoding.parts(&chunk.ordered_shape()),
        };
        let places: Vec<FileRange> = chunk.places().collect();
        let part = |((dtype, shape), place): ((&str, Vec<u64>), FileRange)| StoredPart {
            dtype: dtype.to_owned(),
            shape,
            place,
        };
        (described.len() == places.len()).then(|| described.into_iter().zip(places).map(part).collect())
    }

    /// Refuses a manifest whose parts do not fit together.
    pub(super) fn check(&self, path: &Path) -> Result<()> {
        let block = self.block_bytes;
        if block == 0 || !block.is_multiple_of(4096) || block > MAX_BLOCK_BYTES {
            return refuse(
                path,
                format!("blocks of {block} bytes; they are multiples of 4096 up to {MAX_BLOCK_BYTES}"),
            );
        }
        let mut names = HashSet::new();
        for file in &self.files {
            check_name(&file.name).or_else(|reason| refuse(path, format!("file {:?} {reason}", file.name)))?;
            if !names.insert(file.name.as_str()) {
                return refuse(path, format!("file {:?} is listed twice", file.name));
            }
            if file.bytes > MAX_FILE_BYTES || file.bytes.div_ceil(block) != file.blocks.len() as u64 {
                return refuse(
                    path,
                    format!("file {:?} of {} bytes has {} checksums", file.name, file.bytes, file.blocks.len()),
                );
            }
        }
        let mut taken: Vec<(usize, u64, u64, &str)> = Vec::new();
        for (name, tensor) in &self.tensors {
            self.check_tensor(tensor).or_else(|reason| refuse(path, format!("tensor {name:?}: {reason}")))?;
            let full = tensor.chunks.iter().flat_map(StoredChunk::places).filter(|place| place.begin < place.end);
            taken.extend(full.map(|place| (place.file, place.begin, place.end, name.as_str())));
        }
        for (name, record) in &self.encodings {
            Encoding::of(record).or_else(|reason| refuse(path, format!("encoding {name:?}: {reason}")))?;
        }
        taken.sort_unstable();
        for pair in taken.windows(2) {
            let ((file, _, end, a), (next_file, begin, _, b)) = (pair[0], pair[1]);
            if file == next_file && begin < end {
                return refuse(path, format!("tensors {a:?} and {b:?} share bytes of {:?}", self.files[file].name));
            }
        }
        if let Some(name) = self.objects.keys().find(|name| self.tensors.contains_key(*name)) {
            return refuse(path, format!("{name:?} is both a tensor and a value"));
        }
        for (name, keys) in &self.paths {
            if !keys.iter().all(|key| key.is_string() || key.is_u64()) {
                return refuse(path, format!("the path of {name:?} has a key that is neither a name nor a position"));
            }
        }
        Ok(())
    }

    fn check_tensor(&self, tensor: &Tensor) -> std::result::Result<(), String> {
        let Some(width) = element_bytes(&tensor.dtype) else {
            return Err(format!("its type {:?} is not one of safetensors'", tensor.dtype));
        };
        if tensor.shape.len() > MAX_DIMS {
            return Err(format!("{} dimensions", tensor.shape.len()));
        }
        let fits = volume(&tensor.shape).and_then(|elements| elements.checked_mul(width));
        if fits.is_none_or(|bytes| bytes > MAX_FILE_BYTES) {
            return Err(format!("its shape {:?} is too large", tensor.shape));
        }
        for chunk in &tensor.chunks {
            let at = &chunk.extent.offsets;
            if !chunk.extent.is_inside(&tensor.shape) {
                return Err(format!(
                    "a chunk at {at:?} with shape {:?} leaves its shape {:?}",
                    chunk.extent.shape, tensor.shape
                ));
            }
            self.check_parts(tensor, chunk)?;
        }
        check_cover(&tensor.chunks.iter().map(|chunk| &chunk.extent).collect::<Vec<_>>(), &tensor.shape)
    }

    /// Refuses a box whose bytes do not fit its shape or its encoding.
    fn check_parts(&self, tensor: &Tensor, chunk: &StoredChunk) -> std::result::Result<(), String> {
        let at = &chunk.extent.offsets;
        let encoding = self.encoding(chunk).map_err(|reason| format!("the chunk at {at:?} is {reason}"))?;
        if let Some(encoding) = encoding {
            self.check_encoded(tensor, chunk, encoding)?;
        } else if chunk.order.is_some() || chunk.beside.is_some() {
            return Err(format!("the chunk at {at:?} has a part of an encoding and names none"));
        }
        let kept = encoding.map_or(String::new(), |encoding| format!(" kept as {}", encoding.kind()));
        for place in chunk.places() {
            if self.files.get(place.file).is_none() {
                return Err(format!("the chunk at {at:?} is in file {} of {}", place.file, self.files.len()));
            }
        }
        let Some(parts) = self.parts(tensor, chunk) else {
            let (found, needed) = (chunk.places().count(), encoding.map_or(1, |one| one.suffixes().len()));
            return Err(format!("the chunk at {at:?}{kept} has {found} of {needed} parts"));
        };
        for StoredPart { dtype, shape, place: FileRange { file, begin, end } } in parts {
            let file = &self.files[file];
            // Inside the tensor, so the product fits.
            let bytes = dense_bytes(&dtype, &shape).unwrap_or(0);
            if begin > end || end > file.bytes || end - begin != bytes {
                return Err(format!(
                    "the chunk at {at:?}{kept} has {bytes} bytes of {dtype}, and {begin}..{end} of the {} bytes of {:?}",
                    file.bytes, file.name
                ));
            }
        }
        Ok(())
    }

    fn check_encoded(
        &self,
        tensor: &Tensor,
        chunk: &StoredChunk,
        encoding: Encoding,
    ) -> std::result::Result<(), String> {
        let (at, kind) = (&chunk.extent.offsets, encoding.kind());
        if tensor.dtype != "F32" {
            return Err(format!(
                "the chunk at {at:?} is kept as {kind}, which is for F32 and not for {}",
                tensor.dtype
            ));
        }
        if let Some(order) = &chunk.order {
            let mut sorted = order.clone();
            sorted.sort_unstable();
            if !sorted.into_iter().eq(0..chunk.extent.shape.len()) {
                return Err(format!("the chunk at {at:?} has its {} dimensions in the order {order:?}", at.len()));
            }
        }
        if encoding != Encoding::Compact {
            return Ok(());
        }
        let needs = "compact masters need their bf16 weights; save the model with its optimizer";
        let Some(name) = &tensor.weight else {
            return Err(format!("the chunk at {at:?} is kept as compact, and no weight is named; {needs}"));
        };
        let Some(weight) = self.tensors.get(name) else {
            return Err(format!("it is kept as compact, and its weight {name:?} is not in the checkpoint; {needs}"));
        };
        if weight.dtype != "BF16" || weight.shape != tensor.shape {
            return Err(format!(
                "it is kept as compact with shape {:?}, and its weight {name:?} is {} of shape {:?}; {needs}",
                tensor.shape, weight.dtype, weight.shape
            ));
        }
        Ok(())
    }
}

/// Refuses a name that is not that of a file in the manifest's own folder.
fn check_name(name: &str) -> std::result::Result<(), &'static str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    if name.is_empty() || name.len() > 200 || name.starts_with('.') || !name.bytes().all(plain) {
        return Err("is not a plain name in this folder");
    }
    if !name.ends_with(".safetensors") {
        return Err("is not a safetensors file");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Manifest {
        let file = |name: &str, bytes: u64| FileRecord { name: name.into(), bytes, blocks: vec![7; 1] };
        let chunk = |offset: u64, len: u64, file: usize, begin: u64| {
            StoredChunk::plain(
                TensorBox { offsets: vec![offset, 0], shape: vec![len, 4] },
                file,
                begin,
                begin + len * 16,
            )
        };
        let tensor = |dtype: &str, shape: &[u64], chunks| Tensor {
            dtype: dtype.into(),
            shape: shape.to_vec(),
            chunks,
            weight: None,
        };
        let sharded = tensor("F32", &[3, 4], vec![chunk(0, 2, 0, 64), chunk(2, 1, 1, 64)]);
        let step = tensor("F32", &[], vec![StoredChunk::plain(TensorBox::whole(&[]), 0, 96, 100)]);
        Manifest {
            block_bytes: 4096,
            files: vec![file("0-0.safetensors", 100), file("1-0.safetensors", 80)],
            tensors: [("w".to_owned(), sharded), ("step".to_owned(), step)].into(),
            objects: [("groups".to_owned(), serde_json::json!([{"lr": 0.1}]))].into(),
            paths: [("w".to_owned(), vec![Value::from("w")])].into(),
            made_by: [("forebay".to_owned(), "0".to_owned())].into(),
            ..Manifest::default()
        }
    }

    /// The same with every encoding: 300 elements each, in a file of their own.
    fn native() -> Manifest {
        let mut manifest = sample();
        let mut at = 0;
        let mut take = |bytes: u64| {
            at += bytes;
            FileRange { file: 2, begin: at - bytes, end: at }
        };
        let weight = take(600);
        let weight = StoredChunk::plain(TensorBox::whole(&[20, 15]), 2, weight.begin, weight.end);
        let tensor = |dtype: &str, chunks| Tensor { dtype: dtype.into(), shape: vec![20, 15], chunks, weight: None };
        manifest.tensors.insert("model.w".into(), tensor("BF16", vec![weight]));
        for encoding in Encoding::ALL {
            manifest.encodings.insert(encoding.name().into(), encoding.record());
            let parts = encoding.parts(&[15, 20]);
            let mut places = parts.iter().map(|(dtype, shape)| take(dense_bytes(dtype, shape).unwrap()));
            let first = places.next().unwrap();
            let mut chunk = StoredChunk::plain(TensorBox::whole(&[20, 15]), 2, first.begin, first.end);
            (chunk.encoding, chunk.order) = (Some(encoding.name().into()), Some(vec![1, 0]));
            chunk.beside = places.next();
            let mut kept = tensor("F32", vec![chunk]);
            kept.weight = (encoding == Encoding::Compact).then(|| "model.w".into());
            manifest.tensors.insert(encoding.name().into(), kept);
        }
        manifest.files.push(FileRecord { name: "2-0.safetensors".into(), bytes: at, blocks: vec![7; 1] });
        manifest
    }

    fn parse(text: &[u8]) -> std::result::Result<Manifest, String> {
        Manifest::parse(text, Path::new("m")).map_err(|error| error.to_string())
    }

    /// Text with the right checksum.
    fn sealed(rest: &str) -> Vec<u8> {
        sealed_as(1, rest)
    }

    fn sealed_as(version: usize, rest: &str) -> Vec<u8> {
        let head = HEADS[version - 1];
        format!("{head}{:08x}{AFTER_DIGITS}{rest}", crc32fast::hash(rest.as_bytes())).into_bytes()
    }

    #[test]
    fn text_and_manifest_are_each_others_inverse() {
        for manifest in [sample(), native()] {
            let text = manifest.encode(Path::new("m")).unwrap();
            assert!(serde_json::from_slice::<Value>(&text).unwrap().is_object(), "it is JSON for other tools");
            assert_eq!(parse(&text), Ok(manifest));
        }
    }

    /// A forebay that knows no encodings sees another version, and one that knows them trusts no other combination.
    #[test]
    fn encodings_are_of_version_2() {
        let text = |manifest: &Manifest| String::from_utf8(manifest.encode(Path::new("m")).unwrap()).unwrap();
        assert!(text(&sample()).starts_with("{\"forebay_checkpoint\":1,") && !text(&sample()).contains("encoding"));
        assert!(text(&native()).starts_with("{\"forebay_checkpoint\":2,"));
        let complaint = parse(&sealed_as(1, &text(&native())[PREFIX_BYTES..])).unwrap_err();
        assert!(complaint.contains("format 1 with encodings"), "{complaint}");
        let complaint = parse(&sealed_as(2, &text(&sample())[PREFIX_BYTES..])).unwrap_err();
        assert!(complaint.contains("format 2 with no encodings"), "{complaint}");
    }

    #[test]
    fn encodings_that_do_not_fit_are_refused_with_a_reason() {
        type Edit = fn(&mut Manifest);
        fn chunk<'a>(manifest: &'a mut Manifest, name: &str) -> &'a mut StoredChunk {
            &mut manifest.tensors.get_mut(name).unwrap().chunks[0]
        }
        let cases: &[(Edit, &str)] = &[
            (
                |m| m.encodings.get_mut("8bit-signed").unwrap().block = Some(64),
                "tensor \"8bit-signed\": the chunk at [0, 0] is kept as 8bit in blocks of 64 elements",
            ),
            (
                |m| m.encodings.get_mut("bf16").unwrap().kind = "fp4".into(),
                "tensor \"bf16\": the chunk at [0, 0] is kept as \"fp4\"",
            ),
            (|m| m.encodings.get_mut("8bit-unsigned").unwrap().shares = None, "another table of shares"),
            (|m| drop(m.encodings.remove("bf16")), "kept as \"bf16\", which is not described"),
            (|m| drop(m.encodings.insert("x".into(), EncodingRecord::default())), "encoding \"x\": kept as \"\""),
            (|m| chunk(m, "8bit-signed").end -= 1, "kept as 8bit has 300 bytes of U8"),
            (|m| chunk(m, "8bit-signed").beside.as_mut().unwrap().end += 4, "kept as 8bit has 8 bytes of F32"),
            (|m| chunk(m, "8bit-signed").beside = None, "kept as 8bit has 1 of 2 parts"),
            (|m| chunk(m, "bf16").beside = Some(FileRange { file: 0, begin: 0, end: 0 }), "has 2 of 1 parts"),
            (|m| chunk(m, "compact").beside.as_mut().unwrap().file = 9, "in file 9 of 3"),
            (|m| chunk(m, "compact").beside.as_mut().unwrap().begin = u64::MAX, "has 38 bytes of U8"),
            (|m| chunk(m, "compact").order = Some(vec![0, 0]), "dimensions in the order [0, 0]"),
            (|m| chunk(m, "compact").order = Some(vec![0]), "dimensions in the order [0]"),
            (|m| chunk(m, "bf16").encoding = None, "a part of an encoding and names none"),
            (
                |m| m.tensors.get_mut("bf16").unwrap().dtype = "F16".into(),
                "kept as bf16, which is for F32 and not for F16",
            ),
            (|m| m.tensors.get_mut("compact").unwrap().weight = None, "kept as compact, and no weight is named"),
            (|m| drop(m.tensors.remove("model.w")), "its weight \"model.w\" is not in the checkpoint"),
            (|m| m.tensors.get_mut("compact").unwrap().weight = Some("bf16".into()), "its weight \"bf16\" is F32"),
            (
                |m| {
                    let first = chunk(m, "bf16").clone();
                    chunk(m, "8bit-signed").beside =
                        Some(FileRange { file: 2, begin: first.begin, end: first.begin + 8 })
                },
                "share bytes",
            ),
        ];
        for (i, (edit, reason)) in cases.iter().enumerate() {
            let mut manifest = native();
            edit(&mut manifest);
            let text = manifest.encode(Path::new("m")).unwrap();
            let complaint = parse(&text).expect_err(&format!("case {i}: {reason}"));
            assert!(complaint.starts_with("m: ") && complaint.contains(reason), "case {i}: {complaint}");
        }
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        for text in [sample(), native()].map(|manifest| manifest.encode(Path::new("m")).unwrap()) {
            every_flip_and_cut(&text);
        }
    }

    fn every_flip_and_cut(text: &[u8]) {
        for at in 0..text.len() {
            assert!(parse(&text[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut flipped = text.to_vec();
                flipped[at] ^= 1 << bit;
                assert!(parse(&flipped).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_together_is_refused_with_a_reason() {
        type Edit = fn(&mut Manifest);
        let cases: &[(Edit, &str)] = &[
            (|m| m.block_bytes = 0, "blocks of 0 bytes"),
            (|m| m.block_bytes = 1 << 60, "blocks of"),
            (|m| m.files[0].name = "../x.safetensors".into(), "plain name"),
            (|m| m.files[0].name = "/etc/x.safetensors".into(), "plain name"),
            (|m| m.files[0].name = ".hidden.safetensors".into(), "plain name"),
            (|m| m.files[0].name = "a.bin".into(), "safetensors file"),
            (|m| m.files[0].name = m.files[1].name.clone(), "listed twice"),
            (|m| m.files[0].bytes = 1 << 60, "checksums"),
            (|m| m.files[0].blocks.clear(), "checksums"),
            (|m| tensor(m).dtype = "Q4".into(), "\"Q4\""),
            (|m| tensor(m).shape = vec![1 << 60, 1 << 60], "too large"),
            (|m| tensor(m).shape = vec![1; 100], "100 dimensions"),
            (|m| tensor(m).shape = vec![4, 4], "12 of 16"),
            (|m| tensor(m).shape = vec![2, 4], "leaves its shape"),
            (|m| tensor(m).chunks[1].extent.offsets[0] = 1, "overlap"),
            (|m| tensor(m).chunks[1].extent.offsets[0] = u64::MAX, "leaves its shape"),
            (|m| drop(tensor(m).chunks.pop()), "8 of 12"),
            (|m| tensor(m).chunks[1].file = 9, "in file 9 of 2"),
            (|m| tensor(m).chunks[1].end = 81, "has 16 bytes"),
            (|m| tensor(m).chunks[0].begin = u64::MAX, "has 32 bytes"),
            (|m| (tensor(m).chunks[0].begin, tensor(m).chunks[0].end) = (66, 98), "share bytes"),
            (|m| drop(m.objects.insert("w".into(), Value::Null)), "both a tensor and a value"),
            (|m| drop(m.paths.insert("w".into(), vec![Value::Null])), "neither a name nor a position"),
        ];
        for (i, (edit, reason)) in cases.iter().enumerate() {
            let mut manifest = sample();
            edit(&mut manifest);
            let text = manifest.encode(Path::new("m")).unwrap();
            let complaint = parse(&text).expect_err(&format!("case {i}: {reason}"));
            assert!(complaint.starts_with("m: ") && complaint.contains(reason), "case {i}: {complaint}");
        }
    }

    fn tensor(manifest: &mut Manifest) -> &mut Tensor {
        manifest.tensors.get_mut("w").unwrap()
    }

    /// Edits of a valid manifest's text, sealed anew, so that they reach behind the checksum.
    fn mutated() -> impl Strategy<Value = Vec<u8>> {
        let rest = |manifest: Manifest| {
            String::from_utf8(manifest.encode(Path::new("m")).unwrap()).unwrap()[PREFIX_BYTES..].to_owned()
        };
        let (one, two) = (rest(sample()), rest(native()));
        let piece = prop_oneof![
            Just("18446744073709551615".to_owned()),
            Just("1152921504606846976".to_owned()),
            Just("-1".to_owned()),
            Just("[]".to_owned()),
            Just("{}".to_owned()),
            Just("null".to_owned()),
            Just("\"../x\"".to_owned()),
            Just("[0,0,0]".to_owned()),
            "[0-9\\[\\]{}\",:a-z.-]{0,6}",
        ];
        let edit = (any::<prop::sample::Index>(), 0usize..12, piece);
        (prop::collection::vec(edit, 1..5), 1usize..3).prop_map(move |(edits, version)| {
            let mut rest = if version == 1 { one.clone() } else { two.clone() };
            for (at, cut, piece) in edits {
                let start = at.index(rest.len());
                let end = (start + cut).min(rest.len());
                if rest.is_char_boundary(start) && rest.is_char_boundary(end) {
                    rest.replace_range(start..end, &piece);
                }
                if rest.is_empty() {
                    break;
                }
            }
            sealed_as(version, &rest)
        })
    }

    fn cases() -> u32 {
        forebay_device::testing::kinds::cases(50_000)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever the text, the parser returns; what it accepts fits together and survives being written again.
        #[test]
        fn fuzz_mutations(text in mutated()) {
            if let Ok(manifest) = parse(&text) {
                prop_assert_eq!(parse(&manifest.encode(Path::new("m")).unwrap()), Ok(manifest));
            }
        }

        #[test]
        fn fuzz_bytes(text in prop::collection::vec(any::<u8>(), 0..200), seal in any::<bool>()) {
            let text = if seal { sealed(&String::from_utf8_lossy(&text)) } else { text };
            prop_assert!(parse(&text).is_err());
        }
    }
}
