//! The ways in which the engine's KV cache can lie in memory.

use std::fmt;
use std::str::FromStr;

use kv_proto::BlockOrder;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How a rank's KV cache lies in memory. As text: `hnd` or `nhd`, then `-apart` and `-rows` where they apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheLayout {
    /// Order of heads and tokens inside a block: heads outermost (`hnd`) or tokens outermost (`nhd`).
    pub order: BlockOrder,
    /// Keys and values are areas of their own (`-apart`); otherwise each head of each token has its keys and then its
    /// values.
    pub apart: bool,
    /// All layers of a block lie side by side (`-rows`); otherwise all blocks of a layer do.
    pub rows: bool,
}

impl Default for CacheLayout {
    fn default() -> Self {
        Self { order: BlockOrder::HeadsTokens, apart: false, rows: false }
    }
}

/// A text that names no layout.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{text:?} is no cache layout: hnd or nhd, then -apart and -rows as wanted, in this order")]
pub struct NoSuchLayout {
    /// The text.
    pub text: String,
}

impl CacheLayout {
    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..8).map(|bits| Self {
            order: if bits & 1 == 0 { BlockOrder::HeadsTokens } else { BlockOrder::TokensHeads },
            apart: bits & 2 != 0,
            rows: bits & 4 != 0,
        })
    }
}

impl fmt::Display for CacheLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.order == BlockOrder::HeadsTokens { "hnd" } else { "nhd" })?;
        f.write_str(if self.apart { "-apart" } else { "" })?;
        f.write_str(if self.rows { "-rows" } else { "" })
    }
}

impl FromStr for CacheLayout {
    type Err = NoSuchLayout;

    fn from_str(text: &str) -> Result<Self, NoSuchLayout> {
        let found = Self::all().find(|layout| layout.to_string() == text);
        found.ok_or_else(|| NoSuchLayout { text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layout_is_read_as_it_is_written_and_nothing_else_is() {
        let names: Vec<String> = CacheLayout::all().map(|layout| layout.to_string()).collect();
        assert_eq!(names[..4], ["hnd", "nhd", "hnd-apart", "nhd-apart"]);
        for (layout, name) in CacheLayout::all().zip(&names) {
            assert_eq!(name.parse(), Ok(layout));
        }
        assert_eq!("hnd".parse(), Ok(CacheLayout::default()));
        let error = "hnd-rows-apart".parse::<CacheLayout>().unwrap_err().to_string();
        assert!(error.contains("\"hnd-rows-apart\"") && error.contains("nhd"), "{error}");
    }
}
