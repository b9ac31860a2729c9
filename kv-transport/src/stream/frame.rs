//! The bytes on the wire, version 1. Integers are little endian.
//!
//! # Preface
//!
//! The connecting side sends 64 bytes; the accepting side answers with 64 of its own. What follows are frames, in
//! both directions alike.
//!
//! ```text
//! magic "kvTCP" 0x0d 0x0a 0x1a | version u16 | zero u16 |
//! requests granted at a time u32 | bytes per request granted u32 | ranges per request granted u32 |
//! further u32 | zero u32 | first name 16 | second name 16
//! ```
//!
//! From the accepting side, `further` is the number of connections that the peer may add to this one, and the names are its
//! nonce and the ticket that they have to show. From the connecting side `further` is 0 for a new peer, and the names are
//! its own nonce and the one that it expects of the other side; or 1 for a connection that is added, with the ticket in
//! the place of its own nonce. Added connections carry reads and no messages; all connections of a peer end together.
//!
//! Magic and version lie at the same place in all versions, so that a mismatch can be named.
//!
//! # Frames
//!
//! A header of 16 bytes, then `length` bytes of body.
//!
//! ```text
//! kind u8 | code u8 | zero u16 | length u32 | id u64
//!
//! kind        id     code     body
//! 1 Read      chunk  0        operation u64 | region u64 | region nonce u64 | ranges: { offset u64 | length u32 }
//! 2 Data      chunk  0        the bytes of all its ranges in order
//! 3 End       chunk  outcome  none
//! 4 Message   0      0        the message
//! 5 Ping      any    0        none
//! 6 Pong      echo   0        none
//! 7 Cancel    op     0        none
//! ```
//!
//! Chunk and operation numbers are chosen by the reading side. Each `Read` is answered by one `End`: with outcome
//! 0 directly after its `Data`; with 1 (unknown key), 2 (range beyond the region), 3 (cancelled) or 4 (its device
//! did not give the bytes) without data, or, if the region vanished under way, with 1 directly after its `Data`, which then is worthless. The serving
//! side decides the outcome after it has handed over the last byte: that is how a region that is deregistered
//! during a read never yields wrong bytes as a success (rule T-9).

use super::key::{Key, Nonce};
use crate::contract::MESSAGE_MAX_BYTES;

const MAGIC: [u8; 8] = *b"kvTCP\r\n\x1a";
const VERSION: u16 = 1;

/// Length of a preface.
pub(crate) const PREFACE_BYTES: usize = 64;
/// Length of a frame's header.
pub(crate) const HEADER_BYTES: usize = 16;

const READ_FIXED_BYTES: usize = 24;
const RANGE_BYTES: usize = 12;

/// What one side grants to the other when that reads from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ServeLimits {
    pub(crate) chunk_queue: u32,
    pub(crate) chunk_bytes: u32,
    pub(crate) chunk_ranges: u32,
}

/// What each side says first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Preface {
    pub(crate) limits: ServeLimits,
    pub(crate) further: u32,
    /// Of the sender, or the ticket of a connection that is added.
    pub(crate) nonce: Nonce,
    /// The nonce that is expected of the other side, or the ticket that is given to it.
    pub(crate) expected: Nonce,
}

/// Why a preface was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PrefaceError {
    Magic,
    Version,
    Limits,
}

impl Preface {
    pub(crate) fn encode(&self) -> [u8; PREFACE_BYTES] {
        let mut bytes = [0; PREFACE_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.limits.chunk_queue.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.limits.chunk_bytes.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.limits.chunk_ranges.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.further.to_le_bytes());
        bytes[32..48].copy_from_slice(&self.nonce);
        bytes[48..].copy_from_slice(&self.expected);
        bytes
    }

    /// Refuses a beginning that no continuation could make good, so that a stranger is known by its first byte.
    pub(crate) fn check_start(start: &[u8]) -> Result<(), PrefaceError> {
        let known = start.len().min(MAGIC.len());
        if start[..known] != MAGIC[..known] {
            return Err(PrefaceError::Magic);
        }
        match start.get(8..10) {
            Some(version) if version != VERSION.to_le_bytes() => Err(PrefaceError::Version),
            _ => Ok(()),
        }
    }

    pub(crate) fn decode(bytes: &[u8; PREFACE_BYTES]) -> Result<Self, PrefaceError> {
        Self::check_start(bytes)?;
        let limits = ServeLimits {
            chunk_queue: u32_at(bytes, 12),
            chunk_bytes: u32_at(bytes, 16),
            chunk_ranges: u32_at(bytes, 20),
        };
        if limits.chunk_queue == 0 || limits.chunk_bytes == 0 || limits.chunk_ranges == 0 {
            return Err(PrefaceError::Limits);
        }
        let further = u32_at(bytes, 24);
        let mut preface = Self { limits, further, nonce: [0; 16], expected: [0; 16] };
        preface.nonce.copy_from_slice(&bytes[32..48]);
        preface.expected.copy_from_slice(&bytes[48..]);
        Ok(preface)
    }
}

/// How a chunk ended, as the serving side tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndCode {
    Done,
    UnknownKey,
    Range,
    Cancelled,
    Device,
}

/// A frame's header. Lengths are those of the body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Header {
    Read { chunk: u64, len: u32 },
    Data { chunk: u64, len: u32 },
    End { chunk: u64, code: EndCode },
    Message { len: u32 },
    Ping { id: u64 },
    Pong { id: u64 },
    Cancel { op: u64 },
}

impl Header {
    pub(crate) fn encode(self) -> [u8; HEADER_BYTES] {
        let (kind, code, len, id) = match self {
            Self::Read { chunk, len } => (1, 0, len, chunk),
            Self::Data { chunk, len } => (2, 0, len, chunk),
            Self::End { chunk, code } => (3, code as u8, 0, chunk),
            Self::Message { len } => (4, 0, len, 0),
            Self::Ping { id } => (5, 0, 0, id),
            Self::Pong { id } => (6, 0, 0, id),
            Self::Cancel { op } => (7, 0, 0, op),
        };
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = kind;
        bytes[1] = code;
        bytes[4..8].copy_from_slice(&len.to_le_bytes());
        bytes[8..].copy_from_slice(&id.to_le_bytes());
        bytes
    }

    /// Decodes and bounds every length by what `granted` allows, before anything is allocated for it.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES], granted: ServeLimits) -> Result<Self, &'static str> {
        let (kind, code, len) = (bytes[0], bytes[1], u32_at(bytes, 4));
        let id = u64_at(bytes, 8);
        if bytes[2..4] != [0, 0] {
            return Err("a reserved field is not zero");
        }
        if code != 0 && kind != 3 {
            return Err("a code where there is none");
        }
        if len != 0 && matches!(kind, 3 | 5 | 6 | 7) {
            return Err("a body where there is none");
        }
        match kind {
            1 => {
                let ranges = (len as usize).checked_sub(READ_FIXED_BYTES).ok_or("a read without ranges")?;
                if ranges == 0 || !ranges.is_multiple_of(RANGE_BYTES) {
                    return Err("a read of a strange length");
                }
                if ranges / RANGE_BYTES > granted.chunk_ranges as usize {
                    return Err("a read of more ranges than granted");
                }
                Ok(Self::Read { chunk: id, len })
            }
            2 if len == 0 => Err("data without bytes"),
            2 => Ok(Self::Data { chunk: id, len }),
            3 => {
                let code = match code {
                    0 => EndCode::Done,
                    1 => EndCode::UnknownKey,
                    2 => EndCode::Range,
                    3 => EndCode::Cancelled,
                    4 => EndCode::Device,
                    _ => return Err("an unknown outcome"),
                };
                Ok(Self::End { chunk: id, code })
            }
            4 if len as usize > MESSAGE_MAX_BYTES => Err("a message longer than allowed"),
            4 if id != 0 => Err("a message with a number"),
            4 => Ok(Self::Message { len }),
            5 => Ok(Self::Ping { id }),
            6 => Ok(Self::Pong { id }),
            7 => Ok(Self::Cancel { op: id }),
            _ => Err("an unknown kind of frame"),
        }
    }
}

/// A request for one chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReadBody {
    pub(crate) op: u64,
    pub(crate) key: Key,
    pub(crate) ranges: Vec<(u64, u32)>,
}

/// Appends a `Read` frame.
pub(crate) fn encode_read(out: &mut Vec<u8>, chunk: u64, op: u64, key: Key, ranges: &[(u64, u32)]) {
    let len = READ_FIXED_BYTES + RANGE_BYTES * ranges.len();
    out.reserve(HEADER_BYTES + len);
    out.extend_from_slice(&Header::Read { chunk, len: len as u32 }.encode());
    out.extend_from_slice(&op.to_le_bytes());
    out.extend_from_slice(&key.region.to_le_bytes());
    out.extend_from_slice(&key.nonce.to_le_bytes());
    for (offset, len) in ranges {
        out.extend_from_slice(&offset.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
    }
}

/// Decodes the body of a `Read` frame; the sum of its lengths is bounded by what `granted` allows.
pub(crate) fn decode_read(body: &[u8], granted: ServeLimits) -> Result<ReadBody, &'static str> {
    let (fixed, ranges) = body.split_at_checked(READ_FIXED_BYTES).ok_or("a read without ranges")?;
    let (ranges, rest) = ranges.as_chunks::<RANGE_BYTES>();
    if !rest.is_empty() || ranges.is_empty() {
        return Err("a read of a strange length");
    }
    let ranges: Vec<_> = ranges.iter().map(|range| (u64_at(range, 0), u32_at(range, 8))).collect();
    if ranges.iter().any(|(_, len)| *len == 0) {
        return Err("a read of an empty range");
    }
    let sum: u64 = ranges.iter().map(|(_, len)| u64::from(*len)).sum();
    if sum > u64::from(granted.chunk_bytes) {
        return Err("a read of more bytes than granted");
    }
    let key = Key { region: u64_at(fixed, 8), nonce: u64_at(fixed, 16) };
    Ok(ReadBody { op: u64_at(fixed, 0), key, ranges })
}

/// The four bytes at a place that is known to exist.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

/// The eight bytes at a place that is known to exist.
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANTED: ServeLimits = ServeLimits { chunk_queue: 4, chunk_bytes: 1000, chunk_ranges: 3 };

    #[test]
    fn golden_preface() {
        let preface = Preface {
            limits: ServeLimits { chunk_queue: 1, chunk_bytes: 0x0203, chunk_ranges: 4 },
            further: 5,
            nonce: [0xaa; 16],
            expected: [0xbb; 16],
        };
        let mut golden =
            b"kvTCP\r\n\x1a\x01\0\0\0\x01\0\0\0\x03\x02\0\0\x04\0\0\0\x05\0\0\0\0\0\0\0".to_vec();
        golden.extend_from_slice(&[0xaa; 16]);
        golden.extend_from_slice(&[0xbb; 16]);
        assert_eq!(preface.encode().to_vec(), golden);
        assert_eq!(Preface::decode(&preface.encode()), Ok(preface));
    }

    #[test]
    fn strangers_are_known_by_their_first_bytes() {
        assert_eq!(Preface::check_start(b"G"), Err(PrefaceError::Magic));
        assert_eq!(Preface::check_start(b""), Ok(()));
        assert_eq!(Preface::check_start(b"kvTCP"), Ok(()));
        assert_eq!(Preface::check_start(b"kvTCP\r\n\x1a\x02\0"), Err(PrefaceError::Version));
        let mut bytes = Preface { limits: GRANTED, further: 0, nonce: [0; 16], expected: [0; 16] }.encode();
        bytes[12..16].fill(0);
        assert_eq!(Preface::decode(&bytes), Err(PrefaceError::Limits));
    }

    #[test]
    fn golden_frames() {
        let id = [8, 7, 6, 5, 4, 3, 2, 1];
        let n = 0x0102_0304_0506_0708;
        let cases = [
            (Header::Read { chunk: n, len: 36 }, [1, 0, 0, 0, 36, 0, 0, 0], id),
            (Header::Data { chunk: n, len: 0x0201 }, [2, 0, 0, 0, 1, 2, 0, 0], id),
            (Header::End { chunk: n, code: EndCode::Done }, [3, 0, 0, 0, 0, 0, 0, 0], id),
            (Header::End { chunk: n, code: EndCode::UnknownKey }, [3, 1, 0, 0, 0, 0, 0, 0], id),
            (Header::End { chunk: n, code: EndCode::Range }, [3, 2, 0, 0, 0, 0, 0, 0], id),
            (Header::End { chunk: n, code: EndCode::Cancelled }, [3, 3, 0, 0, 0, 0, 0, 0], id),
            (Header::Message { len: 5 }, [4, 0, 0, 0, 5, 0, 0, 0], [0; 8]),
            (Header::Ping { id: n }, [5, 0, 0, 0, 0, 0, 0, 0], id),
            (Header::Pong { id: n }, [6, 0, 0, 0, 0, 0, 0, 0], id),
            (Header::Cancel { op: n }, [7, 0, 0, 0, 0, 0, 0, 0], id),
        ];
        for (header, start, end) in cases {
            let golden: [u8; 16] = [start, end].concat().try_into().unwrap();
            assert_eq!(header.encode(), golden, "{header:?}");
            assert_eq!(Header::decode(&golden, GRANTED), Ok(header));
        }
    }

    #[test]
    fn golden_read() {
        let mut out = vec![];
        encode_read(&mut out, 1, 2, Key { region: 3, nonce: 4 }, &[(5, 6), (0x0700, 8)]);
        let golden = [
            [1, 0, 0, 0, 48, 0, 0, 0].as_slice(),
            &[1, 0, 0, 0, 0, 0, 0, 0],
            &[2, 0, 0, 0, 0, 0, 0, 0],
            &[3, 0, 0, 0, 0, 0, 0, 0],
            &[4, 0, 0, 0, 0, 0, 0, 0],
            &[5, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0],
            &[0, 7, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0],
        ]
        .concat();
        assert_eq!(out, golden);
        let body = ReadBody { op: 2, key: Key { region: 3, nonce: 4 }, ranges: vec![(5, 6), (0x0700, 8)] };
        assert_eq!(decode_read(&golden[16..], GRANTED), Ok(body));
    }

    #[test]
    fn lengths_are_bounded_before_anything_is_allocated() {
        let refused = |bytes: [u8; 8]| {
            let header: [u8; 16] = [bytes, [0; 8]].concat().try_into().unwrap();
            Header::decode(&header, GRANTED).unwrap_err()
        };
        assert_eq!(refused([1, 0, 0, 0, 24 + 4 * 12, 0, 0, 0]), "a read of more ranges than granted");
        assert_eq!(refused([1, 0, 0, 0, 24, 0, 0, 0]), "a read of a strange length");
        assert_eq!(refused([1, 0, 0, 0, 23, 0, 0, 0]), "a read without ranges");
        assert_eq!(refused([4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]), "a message longer than allowed");
        assert_eq!(refused([5, 0, 0, 0, 1, 0, 0, 0]), "a body where there is none");
        assert_eq!(refused([9, 0, 0, 0, 0, 0, 0, 0]), "an unknown kind of frame");
        let mut out = vec![];
        encode_read(&mut out, 0, 0, Key { region: 0, nonce: 0 }, &[(0, 600), (0, 401)]);
        assert_eq!(decode_read(&out[16..], GRANTED), Err("a read of more bytes than granted"));
        let mut out = vec![];
        encode_read(&mut out, 0, 0, Key { region: 0, nonce: 0 }, &[(0, u32::MAX), (0, u32::MAX)]);
        assert_eq!(decode_read(&out[16..], GRANTED), Err("a read of more bytes than granted"));
    }

    proptest! {
        #[test]
        fn no_header_panics_and_what_decodes_encodes_back(
            kind in 0u8..10, rest in proptest::array::uniform15(any::<u8>()), sparse in any::<bool>()
        ) {
            let mut bytes = [0; 16];
            bytes[0] = kind;
            bytes[1..].copy_from_slice(&rest);
            if sparse {
                bytes[1] &= 3;
                bytes[2..4].fill(0);
                bytes[5..8].fill(0);
            }
            if let Ok(header) = Header::decode(&bytes, GRANTED) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn no_read_body_panics_and_what_decodes_encodes_back(
            mut body in proptest::collection::vec(any::<u8>(), 0..70), small in any::<bool>()
        ) {
            if small {
                for range in body.iter_mut().skip(24).collect::<Vec<_>>().chunks_mut(12) {
                    range.iter_mut().skip(9).for_each(|byte| **byte = 0);
                }
            }
            if let Ok(read) = decode_read(&body, GRANTED) {
                let mut out = vec![];
                encode_read(&mut out, 0, read.op, read.key, &read.ranges);
                prop_assert_eq!(&out[16..], &body[..]);
            }
        }

        #[test]
        fn no_preface_panics(start in 0usize..=10, tail in proptest::collection::vec(any::<u8>(), 64)) {
            let preface = Preface { limits: GRANTED, further: 0, nonce: [0; 16], expected: [0; 16] };
        let mut bytes = preface.encode();
            bytes[start..].copy_from_slice(&tail[start..]);
            if let Ok(preface) = Preface::decode(&bytes) {
                prop_assert_eq!(Preface::decode(&preface.encode()), Ok(preface));
            }
        }
    }
}
