//! What peers say to each other, each frame an active message.
//!
//! ```text
//! frame:   "kv" | version u8 = 2 | kind u8 | 0 u32 | token of the receiver's connection u64 | body
//! Hello:   life expected 16 bytes | own token u64 | window messages u32 | window bytes u64 | own address
//! Welcome: own token u64 | window messages u32 | window bytes u64
//! Refuse:  why u8
//! Message: bytes
//! Credit:  messages taken u32 | bytes taken u64
//! Ping, Pong, Bye: nothing
//! Open:    ticket u64 | for each region: number u64, nonce u64
//! Opened:  ticket u64 | known u8
//! Done:    ticket u64
//! Held:    ticket u64 | held u8
//! Fetch:   fetch u64 | ticket u64 | region u64, nonce u64 | offset u64 | length u64
//! Bytes:   fetch u64 | place among those asked for u64; the bytes come beside the frame
//! ```
//!
//! A reader opens the regions of a read before its first byte and says when it is done. In between the owner keeps
//! their memory, whether or not they are deregistered: UCX emulates reads on many lanes by a copy at the owner, who
//! must not be made to copy from memory that is gone. The answer to `Done` says whether the regions are still
//! registered, and only then the read is good (rule T-9).
//!
//! Where UCX would emulate a get, the reader asks with `Fetch` and the owner sends with `Bytes`, so that neither depends
//! on what UCX does when the other ends in the middle: it was seen to end the owner's process.

use super::address::Life;

use crate::contract::MESSAGE_MAX_BYTES;

const TAG: [u8; 3] = *b"kv\x02";
const HEADER_BYTES: usize = 16;

/// Most regions that one read may touch at a peer.
pub(super) const REGIONS_MAX: usize = 1 << 16;

/// How much a receiver takes before somebody takes it from there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) messages: u32,
    pub(super) bytes: u64,
}

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Refusal {
    /// The life that was asked for is over.
    OtherLife = 1,
    /// No more peers are taken.
    Full = 2,
}

/// Bytes of a region that a reader has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Wanted {
    /// What the reader calls it.
    pub(super) fetch: u64,
    pub(super) ticket: u64,
    pub(super) region: u64,
    pub(super) nonce: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Body {
    Hello { expected: Life, token: u64, window: Window, address: Vec<u8> },
    Welcome { token: u64, window: Window },
    Refuse(Refusal),
    Message(Vec<u8>),
    Credit(Window),
    Ping,
    Pong,
    Bye,
    Open { ticket: u64, regions: Vec<(u64, u64)> },
    Opened { ticket: u64, known: bool },
    Done { ticket: u64 },
    Held { ticket: u64, held: bool },
    Fetch(Wanted),
    Bytes { fetch: u64, at: u64 },
}

/// A frame for one connection of the receiver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) token: u64,
    pub(super) body: Body,
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn bool(&mut self) -> Option<bool> {
        match self.u8()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn window(&mut self) -> Option<Window> {
        Some(Window { messages: self.u32()?, bytes: self.u64()? })
    }
}

/// Longest frame of any kind; a longer one is no frame of ours.
pub(super) const FRAME_MAX_BYTES: usize = MESSAGE_MAX_BYTES + REGIONS_MAX * 16 + 4096;

impl Body {
    /// About how much memory it takes, in bytes.
    pub(super) fn size(&self) -> u64 {
        let inside = match self {
            Self::Message(bytes) => bytes.len(),
            Self::Open { regions, .. } => regions.len() * 16,
            _ => 0,
        };
        inside as u64 + 64
    }
}

impl Frame {
    /// The bytes to be sent.
    pub(super) fn encode(self) -> Vec<u8> {
        let kind = self.body.kind();
        let mut out = Vec::with_capacity(HEADER_BYTES + 64);
        out.extend_from_slice(&TAG);
        out.push(kind);
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.token.to_le_bytes());
        let window = |out: &mut Vec<u8>, window: Window| {
            out.extend_from_slice(&window.messages.to_le_bytes());
            out.extend_from_slice(&window.bytes.to_le_bytes());
        };
        match self.body {
            Body::Hello { expected, token, window: granted, address } => {
                out.extend_from_slice(&expected);
                out.extend_from_slice(&token.to_le_bytes());
                window(&mut out, granted);
                out.extend_from_slice(&address);
            }
            Body::Welcome { token, window: granted } => {
                out.extend_from_slice(&token.to_le_bytes());
                window(&mut out, granted);
            }
            Body::Refuse(why) => out.push(why as u8),
            Body::Message(bytes) => out.extend_from_slice(&bytes),
            Body::Credit(taken) => window(&mut out, taken),
            Body::Ping | Body::Pong | Body::Bye => {}
            Body::Open { ticket, regions } => {
                out.extend_from_slice(&ticket.to_le_bytes());
                for (region, nonce) in regions {
                    out.extend_from_slice(&region.to_le_bytes());
                    out.extend_from_slice(&nonce.to_le_bytes());
                }
            }
            Body::Done { ticket } => out.extend_from_slice(&ticket.to_le_bytes()),
            Body::Opened { ticket, known: word } | Body::Held { ticket, held: word } => {
                out.extend_from_slice(&ticket.to_le_bytes());
                out.push(u8::from(word));
            }
            Body::Fetch(Wanted { fetch, ticket, region, nonce, offset, len }) => {
                for word in [fetch, ticket, region, nonce, offset, len] {
                    out.extend_from_slice(&word.to_le_bytes());
                }
            }
            Body::Bytes { fetch, at } => {
                out.extend_from_slice(&fetch.to_le_bytes());
                out.extend_from_slice(&at.to_le_bytes());
            }
        }
        out
    }

    /// Reads a frame; `None` if it is none of ours.
    pub(super) fn decode(mut bytes: Vec<u8>) -> Option<Self> {
        let mut head = Cursor(&bytes);
        let tag: [u8; 3] = head.array()?;
        let (kind, zero, token) = (head.u8()?, head.u32()?, head.u64()?);
        if tag != TAG || zero != 0 {
            return None;
        }
        if kind == Body::Message(vec![]).kind() {
            bytes.drain(..HEADER_BYTES);
            return Some(Self { token, body: Body::Message(bytes) });
        }
        let mut rest = head;
        let body = match kind {
            1 => Body::Hello {
                expected: rest.array()?,
                token: rest.u64()?,
                window: rest.window()?,
                address: std::mem::take(&mut rest.0).to_vec(),
            },
            2 => Body::Welcome { token: rest.u64()?, window: rest.window()? },
            3 => Body::Refuse(match rest.u8()? {
                1 => Refusal::OtherLife,
                2 => Refusal::Full,
                _ => return None,
            }),
            5 => Body::Credit(rest.window()?),
            6 => Body::Ping,
            7 => Body::Pong,
            8 => Body::Bye,
            9 => {
                let ticket = rest.u64()?;
                if rest.0.len() > REGIONS_MAX * 16 {
                    return None;
                }
                let mut regions = Vec::with_capacity(rest.0.len() / 16);
                while !rest.0.is_empty() {
                    regions.push((rest.u64()?, rest.u64()?));
                }
                Body::Open { ticket, regions }
            }
            10 => Body::Opened { ticket: rest.u64()?, known: rest.bool()? },
            11 => Body::Done { ticket: rest.u64()? },
            12 => Body::Held { ticket: rest.u64()?, held: rest.bool()? },
            13 => Body::Fetch(Wanted {
                fetch: rest.u64()?,
                ticket: rest.u64()?,
                region: rest.u64()?,
                nonce: rest.u64()?,
                offset: rest.u64()?,
                len: rest.u64()?,
            }),
            14 => Body::Bytes { fetch: rest.u64()?, at: rest.u64()? },
            _ => return None,
        };
        rest.0.is_empty().then_some(Self { token, body })
    }
}

impl Body {
    fn kind(&self) -> u8 {
        match self {
            Self::Hello { .. } => 1,
            Self::Welcome { .. } => 2,
            Self::Refuse(_) => 3,
            Self::Message(_) => 4,
            Self::Credit(_) => 5,
            Self::Ping => 6,
            Self::Pong => 7,
            Self::Bye => 8,
            Self::Open { .. } => 9,
            Self::Opened { .. } => 10,
            Self::Done { .. } => 11,
            Self::Held { .. } => 12,
            Self::Fetch(_) => 13,
            Self::Bytes { .. } => 14,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_come_back_and_cut_ones_do_not() {
        let window = Window { messages: 3, bytes: 1 << 40 };
        let all = [
            Body::Hello { expected: [1; 16], token: 2, window, address: vec![1, 2] },
            Body::Welcome { token: 5, window },
            Body::Refuse(Refusal::Full),
            Body::Message(vec![]),
            Body::Message(vec![0; 100]),
            Body::Credit(window),
            Body::Ping,
            Body::Pong,
            Body::Bye,
            Body::Open { ticket: 1, regions: vec![(1, 2), (3, 4)] },
            Body::Opened { ticket: 1, known: true },
            Body::Done { ticket: 1 },
            Body::Held { ticket: 1, held: false },
            Body::Fetch(Wanted { fetch: 1, ticket: 2, region: 3, nonce: 4, offset: 5, len: 6 }),
            Body::Bytes { fetch: 1, at: 2 },
        ];
        for body in all {
            let frame = Frame { token: 77, body };
            let bytes = frame.clone().encode();
            assert_eq!(Frame::decode(bytes.clone()), Some(frame.clone()));
            for cut in 0..HEADER_BYTES {
                assert_eq!(Frame::decode(bytes[..cut].to_vec()), None);
            }
            if !matches!(frame.body, Body::Message(_) | Body::Hello { .. }) {
                assert_eq!(Frame::decode([&bytes[..], &[0]].concat()), None, "{frame:?}");
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_what_decodes_encodes_back(
            kind in 0u8..16, tail in proptest::collection::vec(any::<u8>(), 0..80),
        ) {
            let bytes = [&TAG[..], &[kind, 0, 0, 0, 0], &tail].concat();
            if let Some(frame) = Frame::decode(bytes.clone()) {
                prop_assert_eq!(frame.encode(), bytes);
            }
        }
    }
}
