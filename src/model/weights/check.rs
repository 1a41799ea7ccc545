//! Compares the tensors of a model's files with what its config needs, all differences at once.

use super::{TargetFiles, encoding};
use crate::model::error::Problems;
use safetensors::Dtype;

/// Names in a message before it says how many more there are.
const NAMED: usize = 8;

/// What may stand before `embed_tokens`, `layers` and `norm`: text models, their bare bodies, and the text parts
/// of models for pictures and text in their newer and older forms.
const PREFIXES: [&str; 5] = [
    "model.",
    "",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
];
/// What the head may be called.
const HEADS: [&str; 3] = [
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
];
/// Ends of names that packed formats use.
const PACKED: [&str; 10] = [
    ".qweight",
    ".qzeros",
    ".g_idx",
    ".scales",
    ".weight_packed",
    ".weight_shape",
    ".weight_scale",
    ".SCB",
    ".absmax",
    ".quant_map",
];

impl TargetFiles {
    /// The prefix and the head's name that the files use; the usual ones where they have neither.
    pub(super) fn find_names(&mut self) {
        let has = |name: &str| self.tensors.contains_key(name);
        let prefix = PREFIXES
            .into_iter()
            .find(|prefix| has(&format!("{prefix}embed_tokens.weight")));
        let head = HEADS.into_iter().find(|name| has(name));
        self.prefix = prefix.unwrap_or(PREFIXES[0]);
        self.head = head.unwrap_or(HEADS[0]);
    }

    /// Every tensor that a forward pass may need, and its shape.
    pub(super) fn expected(&self) -> Vec<(String, Vec<usize>)> {
        let c = &self.config;
        let mut expected = vec![
            (
                self.name("embed_tokens.weight"),
                vec![c.vocab_size, c.hidden_size],
            ),
            (self.name("norm.weight"), vec![c.hidden_size]),
        ];
        if !c.tie_word_embeddings {
            expected.push((self.head.to_string(), vec![c.vocab_size, c.hidden_size]));
        }
        for i in 0..c.num_hidden_layers {
            for tensor in c.layer_tensors(i) {
                let name = self.name(&format!("layers.{i}.{}", tensor.name));
                expected.push((name, tensor.shape));
            }
        }
        expected
    }

    /// Compares every tensor that a forward pass may need with the config.
    pub(super) fn check(&mut self, assume_tied: bool, problems: &mut Problems) {
        let embedding = self.name("embed_tokens.weight");
        if let Some(entry) = self.tensors.get(&embedding)
            && let [rows, _] = entry.shape[..]
        {
            self.config.vocab_size = rows;
        }
        let headless = !self.tensors.contains_key(self.head);
        if !self.config.tie_word_embeddings && headless {
            if assume_tied {
                self.config.tie_word_embeddings = true;
            } else {
                problems.add(
                    "has no lm_head.weight though tie_word_embeddings is false; --assume-tied uses the embedding as head",
                );
            }
        }
        let c = &self.config;
        let expected: Vec<_> = self
            .expected()
            .into_iter()
            .filter(|(name, _)| !headless || name != self.head)
            .collect();
        let (mut missing, mut shapes, mut types) = (Vec::new(), Vec::new(), Vec::new());
        for (name, shape) in &expected {
            let Some(entry) = self.tensors.get(name) else {
                missing.push(name.clone());
                continue;
            };
            if entry.shape != *shape {
                shapes.push(format!("{name} is {:?}, not {shape:?}", entry.shape));
            }
            match (encoding(entry.dtype), entry.dtype, c.fp8_block) {
                (Some(_), ..) => {}
                (None, Dtype::F8_E4M3, Some([rows, cols])) if shape.len() == 2 => {
                    let scales = scales_of(name);
                    let blocks = vec![shape[0].div_ceil(rows), shape[1].div_ceil(cols)];
                    match self.tensors.get(&scales) {
                        None => missing.push(scales),
                        Some(entry) if entry.shape != blocks => {
                            shapes.push(format!("{scales} is {:?}, not {blocks:?}", entry.shape));
                        }
                        Some(entry) if encoding(entry.dtype).is_none() => {
                            types.push(format!("{scales} ({})", entry.dtype));
                        }
                        Some(_) => {}
                    }
                }
                _ => types.push(format!("{name} ({})", entry.dtype)),
            }
        }
        list("lacks tensors", &missing, problems);
        list(
            "has tensors of another shape than config.json says",
            &shapes,
            problems,
        );
        list(
            "has tensors that are no float32, float16 or bfloat16",
            &types,
            problems,
        );
        self.refuse_strangers(&expected, problems);
    }

    /// A tensor of a layer that the forward pass would leave out would change what it computes.
    fn refuse_strangers(&self, expected: &[(String, Vec<usize>)], problems: &mut Problems) {
        let known: std::collections::HashSet<&str> =
            expected.iter().map(|(name, _)| name.as_str()).collect();
        let layers = self.name("layers.");
        let (mut packed, mut strangers) = (Vec::new(), Vec::new());
        for name in self.tensors.keys() {
            let Some((layer, part)) = name
                .strip_prefix(&layers)
                .and_then(|rest| rest.split_once('.'))
            else {
                continue;
            };
            let within = layer
                .parse::<usize>()
                .is_ok_and(|layer| layer < self.config.num_hidden_layers);
            let scaled = name
                .strip_suffix("_scale_inv")
                .is_some_and(|weight| known.contains(weight));
            // Frequencies that older files carry along; they follow from the config.
            let derived = part.ends_with("rotary_emb.inv_freq");
            if !within || known.contains(name.as_str()) || derived {
                continue;
            }
            if PACKED.iter().any(|end| name.ends_with(end))
                || (scaled && self.config.fp8_block.is_none())
            {
                packed.push(name.clone());
            } else if !scaled {
                strangers.push(name.clone());
            }
        }
        packed.sort();
        strangers.sort();
        list(
            "has packed or quantised weights, which are not implemented",
            &packed,
            problems,
        );
        let what = format!(
            "has tensors that {} with this config.json does not have",
            self.config.architecture()
        );
        list(&what, &strangers, problems);
    }
}

/// The block scales of an fp8 matrix.
pub(super) fn scales_of(name: &str) -> String {
    format!("{name}_scale_inv")
}

/// Adds one problem that names the first of `items`.
pub(super) fn list(what: &str, items: &[String], problems: &mut Problems) {
    if items.is_empty() {
        return;
    }
    let named = items
        .iter()
        .take(NAMED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    let more = match items.len().saturating_sub(NAMED) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    problems.add(format!("{what}: {named}{more}"));
}
