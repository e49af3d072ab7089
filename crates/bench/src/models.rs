//! Shapes to measure with: those of public models, and synthetic ones of any size.

use forebay::error::{Error, Result};

/// One tensor of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorShape {
    /// Its name.
    pub name: String,
    /// Its elements.
    pub elements: u64,
}

/// A model as a list of tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    /// Its name.
    pub name: String,
    /// Its tensors, in parameter order.
    pub tensors: Vec<TensorShape>,
}

/// The numbers that give a Qwen2.5 model its shapes.
struct Qwen {
    name: &'static str,
    hidden: u64,
    layers: u64,
    intermediate: u64,
    kv: u64,
    vocab: u64,
    tied: bool,
}

const QWEN: [Qwen; 4] = [
    Qwen { name: "qwen2.5-0.5b", hidden: 896, layers: 24, intermediate: 4864, kv: 128, vocab: 151_936, tied: true },
    Qwen { name: "qwen2.5-1.5b", hidden: 1536, layers: 28, intermediate: 8960, kv: 256, vocab: 151_936, tied: true },
    Qwen { name: "qwen2.5-3b", hidden: 2048, layers: 36, intermediate: 11_008, kv: 256, vocab: 151_936, tied: true },
    Qwen { name: "qwen2.5-7b", hidden: 3584, layers: 28, intermediate: 18_944, kv: 512, vocab: 152_064, tied: false },
];

impl Model {
    /// The names that [`Model::named`] knows.
    pub fn names() -> Vec<&'static str> {
        QWEN.iter().map(|qwen| qwen.name).collect()
    }

    /// A public model's shapes.
    pub fn named(name: &str) -> Result<Self> {
        let qwen = QWEN.iter().find(|qwen| qwen.name == name).ok_or_else(|| Error::InvalidOption {
            option: "model",
            value: name.to_owned(),
            remedy: format!("use one of {}", Self::names().join(", ")),
        })?;
        let mut tensors = vec![shape("embed_tokens", qwen.vocab * qwen.hidden)];
        for layer in 0..qwen.layers {
            tensors.extend(layer_shapes(layer, qwen.hidden, qwen.intermediate, qwen.kv));
        }
        tensors.push(shape("norm", qwen.hidden));
        if !qwen.tied {
            tensors.push(shape("lm_head", qwen.vocab * qwen.hidden));
        }
        Ok(Self { name: name.to_owned(), tensors })
    }

    /// A transformer of exactly this many parameters, wide enough to have about a dozen layers.
    pub fn synthetic(params: u64) -> Result<Self> {
        if params == 0 {
            return Err(Error::InvalidOption {
                option: "params",
                value: "0".to_owned(),
                remedy: "give a positive number of parameters".to_owned(),
            });
        }
        let layer = |hidden: u64| layer_shapes(0, hidden, 4 * hidden, hidden / 8);
        let size = |hidden: u64| layer(hidden).iter().map(|tensor| tensor.elements).sum::<u64>();
        let hidden = (1..=256).map(|k| 64 * k).take_while(|&h| h == 64 || 12 * size(h) <= params).last().unwrap_or(64);
        let mut tensors = Vec::new();
        let mut left = params;
        while left >= size(hidden) {
            tensors.extend(layer_shapes(tensors.len() as u64 / 12, hidden, 4 * hidden, hidden / 8));
            left -= size(hidden);
        }
        if left > 0 {
            tensors.push(shape("embed_tokens", left));
        }
        Ok(Self { name: format!("synthetic-{params}"), tensors })
    }

    /// The number of its parameters.
    pub fn params(&self) -> u64 {
        self.tensors.iter().map(|tensor| tensor.elements).sum()
    }
}

fn shape(name: &str, elements: u64) -> TensorShape {
    TensorShape { name: name.to_owned(), elements }
}

fn layer_shapes(layer: u64, hidden: u64, intermediate: u64, kv: u64) -> Vec<TensorShape> {
    [
        ("self_attn.q_proj.weight", hidden * hidden),
        ("self_attn.q_proj.bias", hidden),
        ("self_attn.k_proj.weight", kv * hidden),
        ("self_attn.k_proj.bias", kv),
        ("self_attn.v_proj.weight", kv * hidden),
        ("self_attn.v_proj.bias", kv),
        ("self_attn.o_proj.weight", hidden * hidden),
        ("mlp.gate_proj.weight", intermediate * hidden),
        ("mlp.up_proj.weight", intermediate * hidden),
        ("mlp.down_proj.weight", hidden * intermediate),
        ("input_layernorm.weight", hidden),
        ("post_attention_layernorm.weight", hidden),
    ]
    .into_iter()
    .map(|(name, elements)| TensorShape { name: format!("layers.{layer}.{name}"), elements })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_have_their_published_sizes() {
        for (name, billions) in
            [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.544), ("qwen2.5-3b", 3.086), ("qwen2.5-7b", 7.616)]
        {
            let params = Model::named(name).unwrap().params() as f64 / 1e9;
            assert!((params - billions).abs() < 1e-3, "{name}: {params}");
        }
        assert!(Model::named("gpt-9").unwrap_err().to_string().contains("qwen2.5-3b"));
    }

    #[test]
    fn synthetic_models_have_exactly_the_parameters_asked_for() {
        for params in [1, 63, 50_000, 1_000_000, 25_000_001, 3_000_000_000] {
            let model = Model::synthetic(params).unwrap();
            assert_eq!(model.params(), params);
            assert!(model.tensors.len() < 400, "{params}: {} tensors", model.tensors.len());
        }
        assert!(Model::synthetic(0).is_err());
    }
}
