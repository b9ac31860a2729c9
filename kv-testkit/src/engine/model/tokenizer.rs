//! Bytes as tokens.

/// A tokenizer that takes every byte of UTF-8 text as one token.
///
/// Token ids 0 to 255 are the bytes; [`Tokenizer::END_OF_TEXT`] ends a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tokenizer;

impl Tokenizer {
    /// The token that ends a text.
    pub const END_OF_TEXT: u32 = 256;

    /// Number of tokens: the 256 bytes and the end of text.
    pub const VOCAB_SIZE: usize = 257;

    /// The tokens of a text, one for each of its bytes. Nothing is added before or after.
    pub fn encode(&self, text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// The text of tokens. Ids above 255 stand for no byte and are left out; bytes that are not UTF-8 become
    /// U+FFFD.
    pub fn decode(&self, tokens: &[u32]) -> String {
        let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_comes_back_as_it_was() {
        let text = "Grüße, 世界!\n";
        let tokens = Tokenizer.encode(text);
        assert_eq!(tokens.len(), text.len());
        assert_eq!(Tokenizer.decode(&tokens), text);
    }

    #[test]
    fn what_is_no_byte_is_left_out_and_what_is_no_text_is_replaced() {
        assert_eq!(Tokenizer.decode(&[104, Tokenizer::END_OF_TEXT, 105, 70_000]), "hi");
        assert_eq!(Tokenizer.decode(&[0xff, 104]), "\u{fffd}h");
    }
}
