//! What can go wrong in the model.

use std::path::PathBuf;

use super::reduce::ReduceError;

/// Why a model could not be built, read, written or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The configuration asks for something this model does not implement.
    #[error("{field} = {value} is not supported")]
    Unsupported {
        /// Name of the field in `config.json`.
        field: &'static str,
        /// Its value, as JSON text.
        value: String,
    },
    /// A size that must be at least one is zero.
    #[error("{field} is 0, it must be at least 1")]
    Zero {
        /// Name of the field.
        field: &'static str,
    },
    /// A size is not a multiple of another.
    #[error("{field} = {value} is not a multiple of {divisor_field} = {divisor}")]
    NotDivisible {
        /// Name of the field that must be a multiple.
        field: &'static str,
        /// Its value.
        value: usize,
        /// Name of what it must be a multiple of.
        divisor_field: &'static str,
        /// The value of that.
        divisor: usize,
    },
    /// A number lies outside the range in which it makes sense.
    #[error("{field} = {value} must be finite and greater than 0")]
    NotPositive {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A token id of the configuration lies outside the vocabulary.
    #[error("{field} = {id} lies outside vocab_size = {vocab_size}")]
    SpecialToken {
        /// Name of the field.
        field: &'static str,
        /// The token id.
        id: u32,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// The sizes are so large that the number of elements of a tensor overflows.
    #[error("the sizes {first_field} = {first} and {second_field} = {second} overflow when multiplied")]
    TooLarge {
        /// Name of the first factor.
        first_field: &'static str,
        /// The first factor.
        first: usize,
        /// Name of the second factor.
        second_field: &'static str,
        /// The second factor.
        second: usize,
    },
    /// A file or folder could not be read or written.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// A text is not the JSON that was expected.
    #[error("{origin}: {source}")]
    Json {
        /// The file, or `config.json` where the text did not come from a file.
        origin: PathBuf,
        /// What is wrong, and at which line.
        source: serde_json::Error,
    },
    /// A file is not a valid safetensors file, or could not be written as one.
    #[error("{path}: {source}")]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: safetensors::SafeTensorError,
    },
    /// A folder holds no file whose name ends in `.safetensors`.
    #[error("{folder}: no *.safetensors file")]
    NoTensorFiles {
        /// The folder.
        folder: PathBuf,
    },
    /// The index of a sharded model names a file that is not a plain name inside the folder.
    #[error("{index}: {name:?} is not the name of a file in the same folder")]
    IndexEntry {
        /// The index file.
        index: PathBuf,
        /// The name it gives.
        name: String,
    },
    /// A tensor that the configuration calls for is missing.
    #[error("tensor {name} of shape {expected:?} is missing")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
    },
    /// A tensor has another shape than the configuration calls for.
    #[error("tensor {name} has shape {found:?} instead of {expected:?}")]
    TensorShape {
        /// Name of the tensor.
        name: String,
        /// The shape it should have.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// A tensor holds numbers of a kind that is not read.
    #[error("tensor {name} has dtype {dtype}, only F32, F16 and BF16 are read")]
    TensorDtype {
        /// Name of the tensor.
        name: String,
        /// Its dtype, as safetensors names it.
        dtype: String,
    },
    /// A tensor stands in two files.
    #[error("tensor {name} stands in more than one file, again in {path}")]
    DuplicateTensor {
        /// Name of the tensor.
        name: String,
        /// The second file.
        path: PathBuf,
    },
    /// A file holds a tensor the model has no use for; leaving it out would give wrong answers in silence.
    #[error("{path}: tensor {name} is not part of the model that config.json describes")]
    UnexpectedTensor {
        /// Name of the tensor.
        name: String,
        /// The file.
        path: PathBuf,
    },
    /// A rank does not exist.
    #[error("rank {rank} does not exist among {ranks} ranks")]
    Rank {
        /// The rank asked for.
        rank: usize,
        /// Number of ranks.
        ranks: usize,
    },
    /// A chunk holds no token.
    #[error("chunk {chunk} of the batch holds no token")]
    EmptyChunk {
        /// Index of the chunk in the batch.
        chunk: usize,
    },
    /// A token lies outside the vocabulary.
    #[error("token {token} at position {position} lies outside vocab_size = {vocab_size}")]
    Token {
        /// The token id.
        token: u32,
        /// Its position in the sequence.
        position: usize,
        /// Number of tokens in the vocabulary.
        vocab_size: usize,
    },
    /// A sequence is longer than the model allows.
    #[error("position {position} is beyond max_position_embeddings = {max}")]
    TooLong {
        /// The last position of the chunk (the largest number there is, if it overflows).
        position: usize,
        /// Number of positions of the model.
        max: usize,
    },
    /// A chunk comes with fewer blocks than its positions take.
    #[error("{needed} blocks of {block_tokens} tokens are needed, {given} are given")]
    TooFewBlocks {
        /// Blocks needed to hold all positions up to the end of the chunk.
        needed: usize,
        /// Blocks given.
        given: usize,
        /// Tokens in a block.
        block_tokens: usize,
    },
    /// A reduction gave another amount of numbers than it was asked for.
    #[error("the reduction gave {given} numbers instead of {expected}")]
    ReducedLength {
        /// Numbers it gave.
        given: usize,
        /// Numbers asked for.
        expected: usize,
    },
    /// The partial results of the ranks could not be added up.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
}
