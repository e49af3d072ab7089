//! What a pass costs: time and memory of each layer, as measured.

use serde::{Deserialize, Serialize};

/// The results of one operation inside a layer, which can be saved when the layer is recomputed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorCost {
    /// The operation.
    pub name: String,
    /// Bytes of its results.
    pub bytes: u64,
    /// The time to recompute it.
    pub recompute_ns: u64,
    /// Whether autograd saves it anyway; if not, it takes memory of its own while the layer is recomputed.
    pub saved: bool,
}

/// What one layer costs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerCost {
    /// Its name.
    pub name: String,
    /// Whether it gives the same results when it runs again.
    pub can_recompute: bool,
    /// Its forward pass.
    pub forward_ns: u64,
    /// Its backward pass without recomputation.
    pub backward_ns: u64,
    /// The time to recompute all that it saves.
    pub recompute_ns: u64,
    /// The time that watching its operations adds to a pass, if the results of some of them are saved.
    pub select_ns: u64,
    /// What it saves if it is recomputed: its inputs.
    pub input_bytes: u64,
    /// What it saves if it is not.
    pub saved_bytes: u64,
    /// On the device as it begins, not counting what layers before it saved.
    pub forward_base_bytes: u64,
    /// The peak of its forward pass above that, if it saves.
    pub forward_saving_bytes: u64,
    /// The same if it does not.
    pub forward_bare_bytes: u64,
    /// On the device as its backward pass begins, not counting what it and layers before it saved.
    pub backward_base_bytes: u64,
    /// The peak of its backward pass above that, all that it saved included.
    pub backward_bytes: u64,
    /// Gradients that the pass has made before its backward pass begins: a part of `backward_base_bytes`.
    #[serde(default)]
    pub base_gradient_bytes: u64,
    /// Gradients that the pass has made at the peak of its backward pass, those before it included.
    #[serde(default)]
    pub gradient_bytes: u64,
    /// Results that can be saved when it is recomputed.
    pub tensors: Vec<TensorCost>,
}

/// What one pass costs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PassCost {
    /// Layers in the order of the forward pass.
    pub layers: Vec<LayerCost>,
    /// The peak between the last layer and its backward pass, not counting what layers saved.
    pub tail_bytes: u64,
    /// Gradients that the pass has made at that peak.
    #[serde(default)]
    pub tail_gradient_bytes: u64,
    /// Time outside of layers.
    pub outside_ns: u64,
    /// The rate of copies to the host, in GB/s.
    pub store_gbps: f64,
    /// The rate of copies from the host, in GB/s.
    pub fetch_gbps: f64,
    /// Most bytes that may be on the host at once.
    pub host_bytes: u64,
}

impl PassCost {
    /// The same for `tokens` instead of the `measured` ones; time and memory are taken to be proportional to them, except
    /// for gradients.
    pub fn scaled(&self, tokens: u64, measured: u64) -> Self {
        let grow = |value: &mut u64| {
            let grown = u128::from(*value) * u128::from(tokens) / u128::from(measured.max(1));
            *value = u64::try_from(grown).unwrap_or(u64::MAX);
        };
        let grow_except = |value: &mut u64, gradients: u64| {
            let fixed = gradients.min(*value);
            *value -= fixed;
            grow(value);
            *value = value.saturating_add(fixed);
        };
        let mut cost = self.clone();
        for layer in &mut cost.layers {
            for value in [
                &mut layer.forward_ns,
                &mut layer.backward_ns,
                &mut layer.recompute_ns,
                &mut layer.input_bytes,
                &mut layer.saved_bytes,
                &mut layer.forward_base_bytes,
                &mut layer.forward_saving_bytes,
                &mut layer.forward_bare_bytes,
            ] {
                grow(value);
            }
            grow_except(&mut layer.backward_base_bytes, layer.base_gradient_bytes);
            grow_except(&mut layer.backward_bytes, layer.gradient_bytes.saturating_sub(layer.base_gradient_bytes));
            for tensor in &mut layer.tensors {
                grow(&mut tensor.bytes);
                grow(&mut tensor.recompute_ns);
            }
        }
        grow_except(&mut cost.tail_bytes, cost.tail_gradient_bytes);
        grow(&mut cost.outside_ns);
        cost
    }
}
