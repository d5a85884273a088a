//! Checkpoints taken apart and put together again, to make files that no save would write.

#![allow(unreachable_pub)]

use optimisers::{Checkpoint, CheckpointFile};
use serde_json::Value;

/// What comes before the checksum in a file.
const BEFORE_CHECKSUM: &[u8] = br#"\"checksum\":\""#;

/// The bytes of the file that a checkpoint makes.
pub fn file_of(checkpoint: Checkpoint<'_>) -> Vec<u8> {
    checkpoint.to_bytes().expect("a checkpoint").0
}

/// The file as a checkpoint.
pub fn open(bytes: &[u8]) -> optimisers::Result<CheckpointFile> {
    CheckpointFile::from_bytes("crafted", bytes.to_vec())
}

/// The same bytes with the checksum that they should have, if there is a place for one.
pub fn with_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    let before = bytes
        .windows(BEFORE_CHECKSUM.len())
        .position(|window| window == BEFORE_CHECKSUM);
    let place = before
        .map(|before| before + BEFORE_CHECKSUM.len())
        .filter(|start| start + 8 <= bytes.len());
    if let Some(start) = place {
        bytes[start..start + 8].copy_from_slice(b"00000000");
        let sum = format!("{:08x}", crc32fast::hash(&bytes));
        bytes[start..start + 8].copy_from_slice(sum.as_bytes());
    }
    bytes
}

/// A safetensors file of this header, without a checksum.
pub fn assembled(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The pieces of a checkpoint, to be edited.
#[derive(Clone)]
pub struct Pieces {
    /// The names of tensors with their dtype, shape and place.
    pub tensors: Value,
    /// What the file says about the state.
    pub description: Value,
    pub data: Vec<u8>,
}

impl Pieces {
    pub fn of(bytes: &[u8]) -> Self {
        let length: [u8; 8] = bytes[..8].try_into().expect("eight bytes");
        let (header, data) =
            bytes[8..].split_at(usize::try_from(u64::from_le_bytes(length)).expect("a length"));
        let mut tensors: Value = serde_json::from_slice(header).expect("a header");
        let metadata = tensors
            .as_object_mut()
            .and_then(|tensors| tensors.remove("__metadata__"))
            .expect("metadata");
        let description =
            serde_json::from_str(metadata["optimisers"].as_str().expect("a text")).expect("a description");
        Pieces {
            tensors,
            description,
            data: data.to_vec(),
        }
    }

    /// The file, with the checksum that it should have.
    pub fn bytes(&self) -> Vec<u8> {
        let mut header = self.tensors.clone();
        header["__metadata__"] = serde_json::json!({ "optimisers": self.description.to_string() });
        with_checksum(assembled(&header.to_string(), &self.data))
    }

    /// The bytes of a tensor.
    pub fn tensor(&mut self, name: &str) -> &mut [u8] {
        let place = |i: usize| self.tensors[name]["data_offsets"][i].as_u64().expect("an offset") as usize;
        let range = place(0)..place(1);
        &mut self.data[range]
    }

    /// The hyper-parameters of the first optimiser, rule by rule, of the rules that have any.
    pub fn fields(&mut self) -> Vec<&mut Vec<Value>> {
        fn collect<'v>(rule: &'v mut Value, all: &mut Vec<&'v mut Vec<Value>>) {
            // In the order of the letters: what is a rule's own comes before what it holds.
            for (key, value) in rule.as_object_mut().expect("a rule") {
                match key.as_str() {
                    "fields" => all.push(value.as_array_mut().expect("fields")),
                    "inner" => collect(value, all),
                    "members" => value
                        .as_array_mut()
                        .expect("members")
                        .iter_mut()
                        .for_each(|member| collect(member, all)),
                    _ => {}
                }
            }
        }
        let mut all = Vec::new();
        collect(&mut self.description["optimisers"][0], &mut all);
        all
    }

    /// Adds a tensor at the end of the file.
    pub fn push(&mut self, name: &str, dtype: &str, shape: &[usize], bytes: &[u8]) {
        let start = self.data.len();
        self.data.extend(bytes);
        self.tensors[name] =
            serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, self.data.len()] });
    }
}
