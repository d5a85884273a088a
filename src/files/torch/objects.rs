//! The objects of a pickle, read by candle within bounds.
//!
//! candle trusts a pickle. So [`object`] lets candle read one instruction at a time. Before each,
//! `object` refuses an integer of more than 64 bits and a text longer than the rest; after each, it refuses
//!
//! - too many copies, because candle copies an object each time that it is kept under a number or taken from
//!   there: 40 tuples, each with the one before twice, would be 2⁴⁰ objects;
//! - too deep objects, because what reads, copies or drops an object recurses to its innermost part.
//!
//! The instructions that need a rule of their own, by their letters:
//!
//! ```text
//! q r      keep a copy of the last object    h j      push a copy of a kept object   (a byte, 4 bytes)
//! (        push a mark                       t        a tuple of what is above the mark
//! a e      add to the list below             s u      add to the dict below          (e u: from the mark)
//! 0x80     the version, no object            X 0x8a   a text, an integer of any length
//! ```

use std::collections::HashMap;

use candle_core::pickle::{Object, Stack};

use crate::error::{Error, ErrorKind, Result};

/// The error that a file has another format, or is damaged.
pub(super) fn damaged(reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::new(
        ErrorKind::File,
        "neither a whole safetensors file nor one that `torch.save` writes since torch 1.6",
    )
    .caused_by(reason)
}

/// The error that a file has no state of an optimiser.
pub(super) fn stateless(reason: &'static str) -> Error {
    Error::new(ErrorKind::File, "no optimiser state in the file").caused_by(reason)
}

/// The object that a pickle describes.
pub(super) fn object(pickle: &[u8]) -> Result<Object> {
    /// The most that may be copied, in multiples of the pickle's length.
    const GROWTH: usize = 16;
    /// The most letters that are quoted from an error of candle's.
    const LONGEST: usize = 200;
    let (mut stack, mut rest, mut copied, mut depths) = (Stack::empty(), pickle, 0, Depths::default());
    loop {
        let instruction = rest;
        match *instruction {
            // candle shifts byte i of an i64 by 8·i bits, which overflows from the ninth byte on.
            [0x8a, bytes, ..] if bytes > 8 => return Err(damaged("it has an integer of more than 64 bits")),
            // candle allocates memory for a text before it reads the text.
            [b'X', a, b, c, d, ref after @ ..] if u32::from_le_bytes([a, b, c, d]) as usize > after.len() => {
                return Err(damaged("it ends within a text"));
            }
            _ => {}
        }
        // The backtrace is left out, because its text would read all debug information of the program. The
        // text is cut, because candle's errors may quote whole objects.
        let unread = |error: candle_core::Error| {
            let error =
                if let candle_core::Error::WithBacktrace { inner, .. } = error { *inner } else { error };
            damaged(error.to_string().chars().take(LONGEST).collect::<String>())
        };
        if stack.read(&mut rest).map_err(unread)? {
            return stack.finalize().map_err(unread);
        }
        depths.follow(instruction, stack.stack().len())?;
        if matches!(instruction, [b'h' | b'j' | b'q' | b'r', ..]) {
            copied += stack.stack().last().map_or(0, size);
            if copied > GROWTH * pickle.len() {
                return Err(damaged("its objects refer to each other too often"));
            }
        }
    }
}

/// The depths of the objects that candle has read so far. An object without parts has depth 0.
#[derive(Default)]
struct Depths {
    /// Of the objects on candle's stack, in their order.
    stack: Vec<usize>,
    /// Of the objects that candle keeps, by their numbers.
    kept: HashMap<u32, usize>,
}

impl Depths {
    /// The largest depth that is accepted, far more than the 7 of torch's states.
    const DEEPEST: usize = 64;

    /// Does to the depths what `instruction` has done to candle's stack, which now has `length` objects.
    ///
    /// An instruction pushes an object, makes the last objects a single one, or leaves them as they are.
    fn follow(&mut self, instruction: &[u8], length: usize) -> Result<()> {
        let number = match *instruction {
            [b'h' | b'q', number, ..] => number.into(),
            [b'j' | b'r', a, b, c, d, ..] => u32::from_le_bytes([a, b, c, d]),
            _ => 0,
        };
        // What was at the place of the last object, or above, is inside of that object.
        let place = length.saturating_sub(1).min(self.stack.len());
        let parts = &self.stack[place..];
        // An object is one deeper than its deepest part.
        let last = match (instruction.first(), parts) {
            // A copy is as deep as what was kept.
            (Some(b'h' | b'j'), _) => self.kept.get(&number).copied(),
            (Some(0x80 | b'q' | b'r'), _) => parts.first().copied(),
            // The mark is no part.
            (Some(b't'), [_, parts @ ..]) => parts.iter().map(|part| part + 1).max(),
            // `whole` is the list or dict, which does not become a part of itself.
            (Some(b'a' | b'e' | b's' | b'u'), [whole, parts @ ..]) => {
                parts.iter().map(|part| part + 1).chain([*whole]).max()
            }
            _ => parts.iter().map(|part| part + 1).max(),
        };
        let last = last.unwrap_or(0);
        if last > Self::DEEPEST {
            return Err(damaged(format!("its objects are nested more than {} deep", Self::DEEPEST)));
        }
        if let Some(b'q' | b'r') = instruction.first() {
            self.kept.insert(number, last);
        }
        self.stack.truncate(place);
        self.stack.resize(length, last);
        Ok(())
    }
}

/// The size of an object: the number of objects in it, and of bytes of text.
fn size(object: &Object) -> usize {
    1 + match object {
        Object::Tuple(parts) | Object::List(parts) => parts.iter().map(size).sum(),
        Object::Dict(pairs) => pairs.iter().map(|(key, value)| size(key) + size(value)).sum(),
        Object::Reduce { callable, args } | Object::Build { callable, args } => size(callable) + size(args),
        Object::PersistentLoad(id) => size(id),
        Object::Unicode(text) => text.len(),
        Object::Class { module_name, class_name } => module_name.len() + class_name.len(),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(pickle: &[u8]) -> String {
        object(pickle).expect_err("an error").to_string()
    }

    /// An integer of 9 bytes; 40 tuples, each with the one before twice; a long text that is kept once and
    /// taken often.
    #[test]
    fn pickles_that_candle_would_not_survive() {
        assert!(refused(&[0x8a, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, b'.']).contains("more than 64 bits"));
        let mut pickle = b")q\0".to_vec();
        for i in 0..40 {
            pickle.extend([b'h', i, b'h', i, 0x86, b'q', i + 1]);
        }
        assert!(refused(&[&pickle[..], b"."].concat()).contains("too often"));
        let text = [&b"(X\xe8\x03\0\0"[..], &[b'a'; 1000], b"q\0", &b"h\0".repeat(1000), b"t."].concat();
        assert!(refused(&text).contains("too often"));
        assert!(refused(b"\x95").contains("op-code 149"));
        let quoted = [&b"("[..], &[b'N'; 1000], b"ta."].concat();
        assert!(refused(&[&b"}"[..], &quoted].concat()).len() < 400, "a part of another kind");
    }

    /// A text whose length exceeds the file is refused before memory is allocated for it. Instructions with
    /// other lengths are refused by candle, which does not read them.
    #[test]
    fn lengths_are_at_most_what_is_left() {
        for length in [4u32, 5, 1 << 20, u32::MAX - 15, u32::MAX] {
            let pickle = [&b"\x80\x02X"[..], &length.to_le_bytes(), b"abc."].concat();
            let said = refused(&pickle);
            assert_eq!(said.contains("it ends within a text"), length > 4, "{length}: {said}");
        }
        assert_eq!(object(b"X\x03\0\0\0abc.").expect("a text"), Object::Unicode("abc".to_string()));
        // Texts, bytes and integers of other lengths, and frames.
        for code in
            [0x8b, 0x8c, 0x8d, 0x8e, 0x95, 0x96, b'B', b'C', b'T', b'U', b'V', b'S', b'P', b'L', b'I', b'F']
        {
            let said = refused(&[&[code, 0xff, 0xff, 0xff, 0x7f][..], b"abc."].concat());
            assert!(said.contains(&format!("op-code {code}")), "{said}");
        }
        let cuts: [&[u8]; 13] = [
            b"X",
            b"X\x01\0\0",
            b"\x8a",
            b"\x8a\x08abc",
            b"K",
            b"M\x01",
            b"J\0\0\0",
            b"G\0",
            b"h",
            b"j\0",
            b"Nq",
            b"c",
            b"ca\nb",
        ];
        for cut in cuts {
            refused(cut);
        }
    }

    /// For every instruction that puts objects into another: depth 64 is read, and 65 refused.
    #[test]
    fn depth_is_at_most_64() {
        let times = |times: usize, part: &[u8]| part.repeat(times);
        // Each begins at depth 0 and adds 1 in every round.
        type Rounds = (&'static str, &'static [u8], &'static [u8], &'static [u8]);
        let rounds: [Rounds; 12] = [
            ("tuple of one", b")", b"\x85", b""),
            ("tuple of two", b")", b"N\x86", b""),
            ("tuple of three", b")", b"NN\x87", b""),
            ("called", b")", b")R", b""),
            ("made", b")", b")\x81", b""),
            ("built", b")", b"Nb", b""),
            ("elsewhere", b")", b"Q", b""),
            ("kept and taken", b")", b"q\0h\0\x86", b""),
            ("kept and taken by long numbers", b")", b"r\0\x01\0\0j\0\x01\0\0\x86", b""),
            ("marked tuple", b"(", b"(", b"t"),
            ("list", b"]", b"]", b"a"),
            ("dict", b"}", b"N}", b"s"),
        ];
        for (what, start, inwards, outwards) in rounds {
            let nested = |depth: usize| match outwards {
                // The innermost mark is a tuple of its own.
                b"t" => [times(depth + 1, b"("), times(depth + 1, b"t"), b".".to_vec()].concat(),
                _ => [start, &times(depth, inwards), &times(depth, outwards), b"."].concat(),
            };
            let grows = matches!(what, "kept and taken" | "kept and taken by long numbers");
            if !grows {
                drop(object(&nested(64)).unwrap_or_else(|error| panic!("{what}: {error}")));
            }
            let depths = if grows { &[65, 100][..] } else { &[65, 100, 60_000] };
            for &depth in depths {
                let said = refused(&nested(depth));
                assert!(
                    said.contains("more than 64 deep") || grows && said.contains("too often"),
                    "{what}, {depth}: {said}"
                );
            }
        }
        let several = |depth: usize| [&times(depth, b"](")[..], b"N", &times(depth, b"e"), b"."].concat();
        object(&several(64)).expect("a list");
        assert!(refused(&several(65)).contains("more than 64 deep"));
        let pairs = |depth: usize| [&times(depth, b"}(N")[..], b"N", &times(depth, b"u"), b"."].concat();
        object(&pairs(64)).expect("a dict");
        assert!(refused(&pairs(65)).contains("more than 64 deep"));
        // Many objects next to each other are not deep.
        let wide = [
            b"]".to_vec(),
            times(5000, b"]a"),
            times(5000, b"N\x85a"),
            b"(".to_vec(),
            times(5000, b"}"),
            b"e.".to_vec(),
        ]
        .concat();
        object(&wide).expect("a list");
    }
}
