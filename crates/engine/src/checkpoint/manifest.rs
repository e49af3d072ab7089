//! The manifest: what a checkpoint consists of, checked as a whole before anything of it is used.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::boxes::{TensorBox, check_cover, volume};
use super::{element_bytes, refuse};
use crate::error::Result;

/// The version of the format.
const VERSION: u32 = 1;
/// The beginning of the text, followed at once by the checksum's eight digits.
const HEAD: &str = "{\"forebay_checkpoint\":1,\"crc32\":\"";
const AFTER_DIGITS: &str = "\",";
const PREFIX_BYTES: usize = HEAD.len() + 8 + AFTER_DIGITS.len();
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
}

impl Tensor {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        // Checked when the manifest was.
        volume(&self.shape).unwrap_or(0).saturating_mul(element_bytes(&self.dtype).unwrap_or(0))
    }
}

impl Manifest {
    /// Reads a manifest's text and checks all that can be checked without the files. `path` is for errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let digits = &text.get(HEAD.len()..HEAD.len() + 8).unwrap_or_default();
        let is_ours = text.len() > PREFIX_BYTES
            && text.starts_with(HEAD.as_bytes())
            && text[HEAD.len() + 8..].starts_with(AFTER_DIGITS.as_bytes());
        if !is_ours {
            let found = String::from_utf8_lossy(&text[..text.len().min(40)]).into_owned();
            return refuse(path, format!("not a manifest of format {VERSION}: it begins with {found:?}"));
        }
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
            Err(error) => return refuse(path, format!("not a manifest of format {VERSION}: {error}")),
        };
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
        Ok([format!("{HEAD}{:08x}{AFTER_DIGITS}", crc32fast::hash(rest)).as_bytes(), rest].concat())
    }

    /// Bytes of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensors.values().map(Tensor::bytes).fold(0, u64::saturating_add)
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
            let full = tensor.chunks.iter().filter(|chunk| chunk.begin < chunk.end);
            taken.extend(full.map(|chunk| (chunk.file, chunk.begin, chunk.end, name.as_str())));
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
            let Some(file) = self.files.get(chunk.file) else {
                return Err(format!("the chunk at {at:?} is in file {} of {}", chunk.file, self.files.len()));
            };
            // Inside the tensor, so the product fits.
            let bytes = volume(&chunk.extent.shape).unwrap_or(0) * width;
            if chunk.begin > chunk.end || chunk.end > file.bytes || chunk.end - chunk.begin != bytes {
                return Err(format!(
                    "the chunk at {at:?} has {bytes} bytes, and {}..{} of the {} bytes of {:?}",
                    chunk.begin, chunk.end, file.bytes, file.name
                ));
            }
        }
        check_cover(&tensor.chunks.iter().map(|chunk| &chunk.extent).collect::<Vec<_>>(), &tensor.shape)
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
        let chunk = |offset: u64, len: u64, file: usize, begin: u64| StoredChunk {
            extent: TensorBox { offsets: vec![offset, 0], shape: vec![len, 4] },
            file,
            begin,
            end: begin + len * 16,
        };
        let sharded =
            Tensor { dtype: "F32".into(), shape: vec![3, 4], chunks: vec![chunk(0, 2, 0, 64), chunk(2, 1, 1, 64)] };
        let scalar = StoredChunk { extent: TensorBox::whole(&[]), file: 0, begin: 96, end: 100 };
        let step = Tensor { dtype: "F32".into(), shape: vec![], chunks: vec![scalar] };
        Manifest {
            block_bytes: 4096,
            files: vec![file("0-0.safetensors", 100), file("1-0.safetensors", 80)],
            tensors: [("w".to_owned(), sharded), ("step".to_owned(), step)].into(),
            objects: [("groups".to_owned(), serde_json::json!([{"lr": 0.1}]))].into(),
            paths: [("w".to_owned(), vec![Value::from("w")])].into(),
            made_by: [("forebay".to_owned(), "0".to_owned())].into(),
        }
    }

    fn parse(text: &[u8]) -> std::result::Result<Manifest, String> {
        Manifest::parse(text, Path::new("m")).map_err(|error| error.to_string())
    }

    /// Text with the right checksum.
    fn sealed(rest: &str) -> Vec<u8> {
        format!("{HEAD}{:08x}{AFTER_DIGITS}{rest}", crc32fast::hash(rest.as_bytes())).into_bytes()
    }

    #[test]
    fn text_and_manifest_are_each_others_inverse() {
        let text = sample().encode(Path::new("m")).unwrap();
        assert_eq!(parse(&text), Ok(sample()));
        assert!(serde_json::from_slice::<Value>(&text).unwrap().is_object(), "it is JSON for other tools");
    }

    #[test]
    fn every_flipped_bit_and_every_truncation_is_refused() {
        let text = sample().encode(Path::new("m")).unwrap();
        for at in 0..text.len() {
            assert!(parse(&text[..at]).is_err(), "cut at {at}");
            for bit in 0..8 {
                let mut flipped = text.clone();
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
        let text = String::from_utf8(sample().encode(Path::new("m")).unwrap()).unwrap();
        let rest = text[PREFIX_BYTES..].to_owned();
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
        prop::collection::vec(edit, 1..5).prop_map(move |edits| {
            let mut rest = rest.clone();
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
            sealed(&rest)
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
