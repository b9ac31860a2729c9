//! A pair of shape files to begin with.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

use crate::error::Failure;

/// File names and what goes into them.
pub(super) const FILES: [(&str, &str); 2] = [
    (
        "prefill.toml",
        "\
# The engine that computes prompts: four ranks, blocks of 16 tokens.

# The model. Both engines must have the same.
layers = 32
heads = 8                   # KV heads over all ranks
head_size = 128
dtype = \"bf16\"              # f32, f16, bf16, f8_e4m3, f8_e5m2 or u8
mla = false                 # true: one latent of head_size elements for each token; heads is 1

# How the engine is cut.
ranks = 4                   # in all: tensor-parallel ranks of all stages
stages = 1                  # pipeline stages
context = 1                 # ranks over which tokens are dealt out; 1, or the ranks of a stage

# How a rank's cache lies in memory.
block_tokens = 16           # tokens of a block of the scheduler, on one rank
kernel_tokens = 0           # tokens of a block of the attention kernel; 0: the same
order = \"hnd\"               # hnd: each head's tokens together; nhd: each token's heads together
keys_and_values = \"apart\"   # apart: two regions for each layer; together: side by side for each head and token
outermost = \"layer\"         # layer: each layer's blocks together; block: each block's layers together
",
    ),
    (
        "decode.toml",
        "\
# The engine that answers: two ranks, blocks of 64 tokens that the kernel sees as four of 16.

layers = 32
heads = 8
head_size = 128
dtype = \"bf16\"

ranks = 2
block_tokens = 64
kernel_tokens = 16
order = \"hnd\"

# A model with several kinds of attention names its block groups. These would be one with full attention in every
# sixth layer, and a window of 1024 tokens in the others:
#
# [[groups]]
# kind = \"full\"
# layers = \"5-31/6\"
#
# [[groups]]
# kind = \"window\"
# window = 1024
# layers = \"0-4,6-10,12-16,18-22,24-28,30-31\"
#
# A group of kind \"state\" has `parts` (what is shared out over ranks) and `part_size` (elements of one).
",
    ),
];

/// Writes both files into a folder. Files that are there already are left alone.
pub(super) fn write(folder: &Path) -> Result<(), Failure> {
    for (name, text) in FILES {
        let path = folder.join(name);
        let failed = |e: std::io::Error| Failure::new(path.display().to_string(), e);
        let mut file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(failed)?;
        file.write_all(text.as_bytes()).map_err(failed)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
