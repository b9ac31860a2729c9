//! Reading and writing a model as a folder of safetensors files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::config::ModelConfig;
use super::error::ModelError;
use super::weights::{LM_HEAD, Weights, tensor_shapes};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";

impl Weights {
    /// Reads a model from a folder in the Hugging Face layout: `config.json`, and the tensors in the files
    /// that `model.safetensors.index.json` names or, without one, in all files `*.safetensors`. Tensors of
    /// the dtypes F32, F16 and BF16 are read, all as `f32`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Io`], [`ModelError::Json`] and [`ModelError::Safetensors`] for files that cannot be
    /// read; what [`ModelConfig::from_json`] says; and for tensors that are missing, of another shape or
    /// dtype, twice there, or unknown, an error that names the tensor.
    pub fn from_folder(folder: &Path) -> Result<Self, ModelError> {
        let path = folder.join(CONFIG);
        let config = ModelConfig::parse(&read_text(&path)?, &path)?;
        let shapes: BTreeMap<String, Vec<usize>> = tensor_shapes(&config).into_iter().collect();
        let mut tensors = BTreeMap::new();
        for path in tensor_files(folder)? {
            read_file(&path, &config, &shapes, &mut tensors)?;
        }
        for (name, expected) in shapes {
            if !tensors.contains_key(&name) {
                return Err(ModelError::MissingTensor { name, expected });
            }
        }
        Ok(Self::from_parts(config, tensors))
    }

    /// Writes the model into a folder, which is created if need be: `config.json` of a Llama model, and
    /// `model.safetensors` with all tensors as F32. Files of these names are replaced.
    ///
    /// # Errors
    ///
    /// [`ModelError::Io`] or [`ModelError::Safetensors`] if the folder or a file cannot be written,
    /// [`ModelError::MissingTensor`] if the weights lack a tensor.
    pub fn to_folder(&self, folder: &Path) -> Result<(), ModelError> {
        fs::create_dir_all(folder).map_err(|source| ModelError::Io { path: folder.to_path_buf(), source })?;
        let path = folder.join(CONFIG);
        let mut config = serde_json::to_value(self.config())
            .map_err(|source| ModelError::Json { origin: path.clone(), source })?;
        config["architectures"] = json!(["LlamaForCausalLM"]);
        config["model_type"] = json!("llama");
        config["hidden_act"] = json!("silu");
        config["torch_dtype"] = json!("float32");
        fs::write(&path, format!("{config:#}\n")).map_err(|source| ModelError::Io { path, source })?;

        let path = folder.join(SINGLE);
        let failed = |source| ModelError::Safetensors { path: path.clone(), source };
        let mut bytes = Vec::new();
        for (name, shape) in tensor_shapes(self.config()) {
            let Some(values) = self.tensor(&name) else {
                return Err(ModelError::MissingTensor { name, expected: shape });
            };
            let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            bytes.push((name, shape, data));
        }
        let mut views = Vec::new();
        for (name, shape, data) in &bytes {
            views.push((name, TensorView::new(Dtype::F32, shape.clone(), data).map_err(failed)?));
        }
        // Loaders elsewhere refuse files that do not say which framework's layout they follow.
        let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
        safetensors::serialize_to_file(views, Some(metadata), &path).map_err(failed)
    }
}

fn read_text(path: &Path) -> Result<String, ModelError> {
    fs::read_to_string(path).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })
}

/// The files that hold the tensors, in the order of their names.
fn tensor_files(folder: &Path) -> Result<BTreeSet<PathBuf>, ModelError> {
    let index = folder.join(INDEX);
    if index.exists() {
        return indexed_files(folder, index);
    }
    let failed = |source| ModelError::Io { path: folder.to_path_buf(), source };
    let mut files = BTreeSet::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if path.extension() == Some(OsStr::new("safetensors")) {
            files.insert(path);
        }
    }
    if files.is_empty() {
        return Err(ModelError::NoTensorFiles { folder: folder.to_path_buf() });
    }
    Ok(files)
}

fn indexed_files(folder: &Path, index: PathBuf) -> Result<BTreeSet<PathBuf>, ModelError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let parsed: Result<Index, _> = serde_json::from_str(&read_text(&index)?);
    let map = match parsed {
        Ok(parsed) => parsed.weight_map,
        Err(source) => return Err(ModelError::Json { origin: index, source }),
    };
    let mut files = BTreeSet::new();
    for name in map.into_values() {
        // A name with folders in it could lead out of the model's folder.
        if Path::new(&name).file_name() != Some(OsStr::new(&name)) {
            return Err(ModelError::IndexEntry { index, name });
        }
        files.insert(folder.join(name));
    }
    if files.is_empty() {
        return Err(ModelError::NoTensorFiles { folder: folder.to_path_buf() });
    }
    Ok(files)
}

/// Reads all tensors of one file into `tensors`.
fn read_file(
    path: &Path,
    config: &ModelConfig,
    shapes: &BTreeMap<String, Vec<usize>>,
    tensors: &mut BTreeMap<String, Vec<f32>>,
) -> Result<(), ModelError> {
    let bytes = fs::read(path).map_err(|source| ModelError::Io { path: path.to_path_buf(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|source| ModelError::Safetensors { path: path.to_path_buf(), source })?;
    for (name, view) in file.iter() {
        let Some(expected) = shapes.get(name) else {
            // Some files repeat the tied embedding, or store a table that follows from the configuration.
            if (config.tie_word_embeddings && name == LM_HEAD) || name.ends_with("rotary_emb.inv_freq") {
                continue;
            }
            return Err(ModelError::UnexpectedTensor { name: name.to_owned(), path: path.to_path_buf() });
        };
        if view.shape() != expected {
            return Err(ModelError::TensorShape {
                name: name.to_owned(),
                expected: expected.clone(),
                found: view.shape().to_vec(),
            });
        }
        let values = numbers(name, view.dtype(), view.data())?;
        if tensors.insert(name.to_owned(), values).is_some() {
            return Err(ModelError::DuplicateTensor { name: name.to_owned(), path: path.to_path_buf() });
        }
    }
    Ok(())
}

fn numbers(name: &str, dtype: Dtype, data: &[u8]) -> Result<Vec<f32>, ModelError> {
    match dtype {
        Dtype::F32 => Ok(data.as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()),
        Dtype::BF16 => Ok(halves(data, |bits| f32::from_bits(u32::from(bits) << 16))),
        Dtype::F16 => Ok(halves(data, from_f16)),
        other => Err(ModelError::TensorDtype { name: name.to_owned(), dtype: other.to_string() }),
    }
}

fn halves(data: &[u8], convert: impl Fn(u16) -> f32) -> Vec<f32> {
    data.as_chunks().0.iter().map(|&bytes| convert(u16::from_le_bytes(bytes))).collect()
}

/// The number that the bits of an IEEE 754 half stand for. Every one is an `f32` exactly.
fn from_f16(bits: u16) -> f32 {
    let sign = if bits >> 15 == 0 { 1.0 } else { -1.0 };
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits) & 0x3ff;
    let magnitude = match exponent {
        // Below the smallest normal number: multiples of 2^-24.
        0 => fraction as f32 / 16_777_216.0,
        0x1f if fraction == 0 => f32::INFINITY,
        0x1f => f32::NAN,
        _ => f32::from_bits((exponent + 112) << 23 | fraction << 13),
    };
    sign * magnitude
}

#[cfg(test)]
mod tests {
    use super::super::support::TempFolder;
    use super::*;

    fn small() -> ModelConfig {
        ModelConfig { num_hidden_layers: 2, vocab_size: 20, eos_token_id: Some(3), ..ModelConfig::tiny() }
    }

    /// Writes some tensors of a model into a file, with `convert` making the bytes of a number.
    fn write(
        path: &Path,
        weights: &Weights,
        dtype: Dtype,
        convert: fn(f32) -> Vec<u8>,
        take: fn(&str) -> bool,
    ) {
        let chosen: Vec<(String, Vec<usize>, Vec<u8>)> = tensor_shapes(weights.config())
            .into_iter()
            .filter(|(name, _)| take(name))
            .map(|(name, shape)| {
                let data = weights.tensor(&name).unwrap().iter().flat_map(|&x| convert(x)).collect();
                (name, shape, data)
            })
            .collect();
        let views = chosen
            .iter()
            .map(|(name, shape, data)| (name, TensorView::new(dtype, shape.clone(), data).unwrap()));
        safetensors::serialize_to_file(views, None, path).unwrap();
    }

    fn f32_bytes(x: f32) -> Vec<u8> {
        x.to_le_bytes().to_vec()
    }

    #[test]
    fn a_written_model_is_read_back_the_same() {
        let folder = TempFolder::new();
        for tied in [false, true] {
            let config = ModelConfig { tie_word_embeddings: tied, head_dim: None, ..small() };
            let weights = Weights::seeded(&config, 5).unwrap();
            weights.to_folder(folder.path()).unwrap();
            let read = Weights::from_folder(folder.path()).unwrap();
            assert_eq!(read, weights);
            assert_eq!(read.fingerprint(), weights.fingerprint());
        }
    }

    #[test]
    fn shards_are_read_with_and_without_an_index() {
        let folder = TempFolder::new();
        let weights = Weights::seeded(&small(), 6).unwrap();
        weights.to_folder(folder.path()).unwrap();
        fs::remove_file(folder.path().join(SINGLE)).unwrap();
        let (one, two) = (folder.path().join("a.safetensors"), folder.path().join("b.safetensors"));
        write(&one, &weights, Dtype::F32, f32_bytes, |name| name.contains("mlp"));
        write(&two, &weights, Dtype::F32, f32_bytes, |name| !name.contains("mlp"));
        assert_eq!(Weights::from_folder(folder.path()).unwrap(), weights);

        // What the index does not name is not read.
        fs::write(folder.path().join("c.safetensors"), "no tensors").unwrap();
        let index = json!({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}});
        fs::write(folder.path().join(INDEX), index.to_string()).unwrap();
        assert_eq!(Weights::from_folder(folder.path()).unwrap(), weights);

        let index = json!({"weight_map": {"x": "../a.safetensors"}});
        fs::write(folder.path().join(INDEX), index.to_string()).unwrap();
        assert!(matches!(Weights::from_folder(folder.path()), Err(ModelError::IndexEntry { .. })));
    }

    #[test]
    fn halves_are_converted_exactly() {
        let folder = TempFolder::new();
        let weights = Weights::seeded(&small(), 7).unwrap();
        weights.to_folder(folder.path()).unwrap();
        let cut = |x: f32| (x.to_bits() >> 16) as u16;
        let path = folder.path().join(SINGLE);
        write(
            &path,
            &weights,
            Dtype::BF16,
            |x| ((x.to_bits() >> 16) as u16).to_le_bytes().to_vec(),
            |_| true,
        );
        let read = Weights::from_folder(folder.path()).unwrap();
        for (name, _) in tensor_shapes(weights.config()) {
            for (&read, &original) in read.tensor(&name).unwrap().iter().zip(weights.tensor(&name).unwrap()) {
                assert_eq!(read.to_bits(), u32::from(cut(original)) << 16);
            }
        }
        // The number 1.5 everywhere.
        write(&path, &weights, Dtype::F16, |_| 0x3e00_u16.to_le_bytes().to_vec(), |_| true);
        let read = Weights::from_folder(folder.path()).unwrap();
        assert!(read.tensor(LM_HEAD).unwrap().iter().all(|&x| x == 1.5));
    }

    #[test]
    fn every_half_has_its_value() {
        assert_eq!(from_f16(0x0000).to_bits(), 0);
        assert_eq!(from_f16(0x8000).to_bits(), (-0.0_f32).to_bits());
        assert_eq!(from_f16(0x3c00), 1.0);
        assert_eq!(from_f16(0xc200), -3.0);
        assert_eq!(from_f16(0x7bff), 65504.0);
        assert_eq!(from_f16(0x0001), 2.0_f32.powi(-24));
        assert_eq!(from_f16(0x0400), 2.0_f32.powi(-14));
        assert_eq!(from_f16(0xfc00), f32::NEG_INFINITY);
        assert!(from_f16(0x7e00).is_nan());
    }

    #[test]
    fn faulty_folders_are_refused_by_name() {
        let folder = TempFolder::new();
        let message = || Weights::from_folder(folder.path()).unwrap_err().to_string();
        assert!(message().contains("config.json: "), "{}", message());
        let weights = Weights::seeded(&small(), 8).unwrap();
        weights.to_folder(folder.path()).unwrap();
        let path = folder.path().join(SINGLE);

        write(&path, &weights, Dtype::F32, f32_bytes, |name| !name.contains("1.self_attn.k_proj"));
        assert_eq!(message(), "tensor model.layers.1.self_attn.k_proj.weight of shape [64, 64] is missing");

        let wider = ModelConfig { intermediate_size: 132, ..small() };
        let wider = Weights::seeded(&wider, 8).unwrap();
        write(&path, &wider, Dtype::F32, f32_bytes, |name| name.contains("0.mlp.up_proj"));
        let expected = "tensor model.layers.0.mlp.up_proj.weight has shape [132, 64] instead of [128, 64]";
        assert_eq!(message(), expected);

        let deeper = ModelConfig { num_hidden_layers: 3, ..small() };
        let deeper = Weights::seeded(&deeper, 8).unwrap();
        write(&path, &deeper, Dtype::F32, f32_bytes, |name| name.contains("layers.2.mlp.up"));
        assert!(
            message()
                .ends_with("layers.2.mlp.up_proj.weight is not part of the model that config.json describes")
        );

        write(&path, &weights, Dtype::I32, f32_bytes, |_| true);
        assert!(message().ends_with("has dtype I32, only F32, F16 and BF16 are read"), "{}", message());

        write(&path, &weights, Dtype::F32, f32_bytes, |_| true);
        write(&folder.path().join("z.safetensors"), &weights, Dtype::F32, f32_bytes, |name| name == LM_HEAD);
        assert!(message().starts_with("tensor lm_head.weight stands in more than one file"), "{}", message());

        fs::remove_file(folder.path().join("z.safetensors")).unwrap();
        fs::write(&path, [0xff; 40]).unwrap();
        assert!(matches!(Weights::from_folder(folder.path()), Err(ModelError::Safetensors { .. })));
        fs::remove_file(&path).unwrap();
        assert!(message().ends_with("no *.safetensors file"), "{}", message());
    }
}
