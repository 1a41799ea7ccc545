//! Where a run's model and conversations lie, and what of a model does not go together with the run.

use std::path::{Path, PathBuf};

use super::hub::{Hub, HubName};
use super::options::Options;
use super::prepare::Refusal;
use crate::data::{self, demo};
use crate::engine::LossOptions;
use crate::model::TargetConfig;
use crate::monitor::console::Console;

/// Largest heads that attention on GPUs takes.
const GPU_HEAD_DIM: usize = 256;

/// Where model and conversations lie.
pub(super) struct Sources {
    pub model: PathBuf,
    /// Name and commit of a model that came from a hub.
    pub hub: Option<String>,
    pub data: Vec<PathBuf>,
}

impl Sources {
    /// The demo's are written to the cache, since they are part of this program; a model that is named is fetched.
    pub(super) fn find(options: &Options, console: &Console) -> Result<Self, Refusal> {
        let mut data = options.data.files.clone();
        let Some(given) = &options.target.model else {
            let demo = demo::write(&data::default_cache_dir().join("demo"))?;
            if data.is_empty() {
                data.push(demo.data);
            }
            return Ok(Self {
                model: demo.model_dir,
                hub: None,
                data,
            });
        };
        let (model, hub) = locate(given, console)?;
        Ok(Self { model, hub, data })
    }
}

/// Directory of a model that was given by its path or by its name on a hub, from which it is fetched; then also its
/// name and commit there.
pub(super) fn locate(
    given: &Path,
    console: &Console,
) -> Result<(PathBuf, Option<String>), Refusal> {
    let Some(name) = HubName::parse(given) else {
        return Ok((given.to_owned(), None));
    };
    let fetched = Hub::from_env()?.fetch(&name, &|line| console.line(line))?;
    console.line(&format!("target: {}", fetched.source));
    Ok((fetched.dir, Some(fetched.source)))
}

/// What this target cannot do together with this loss.
pub(super) fn unsupported(loss: &LossOptions, target: &TargetConfig) -> Option<String> {
    (loss.use_soft_labels && target.final_cap.is_some()).then(|| {
        format!(
            "--use-soft-labels: the logits of {} are capped (final_logit_softcapping), which soft labels do not know; leave them off",
            target.architecture()
        )
    })
}

/// What GPUs cannot run of this target.
pub(super) fn check_on_gpus(source: &Sources, target: &TargetConfig) -> Result<(), Refusal> {
    if target.head_dim <= GPU_HEAD_DIM {
        return Ok(());
    }
    Err(Refusal(vec![format!(
        "{}: head_dim is {}, and attention on GPUs works up to {GPU_HEAD_DIM}; --cpu runs it on CPUs",
        source.model.display(),
        target.head_dim
    )]))
}

#[cfg(test)]
mod tests {

    use super::*;

    fn gemma2() -> TargetConfig {
        let folder = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/golden/families/gemma2/model"
        );
        TargetConfig::read(Path::new(folder)).unwrap()
    }

    #[test]
    fn soft_labels_and_capped_logits_exclude_each_other() {
        let mut loss = LossOptions::default();
        let mut target = gemma2();
        assert_eq!(unsupported(&loss, &target), None);
        loss.use_soft_labels = true;
        let problem = unsupported(&loss, &target).unwrap();
        assert!(
            problem.contains("logits of Gemma2ForCausalLM are capped"),
            "{problem}"
        );
        target.final_cap = None;
        assert_eq!(unsupported(&loss, &target), None);
    }

    #[test]
    fn heads_that_are_too_large_for_gpus_are_refused() {
        let source = Sources {
            model: "m".into(),
            hub: None,
            data: Vec::new(),
        };
        let mut target = gemma2();
        target.head_dim = 256;
        assert!(check_on_gpus(&source, &target).is_ok());
        target.head_dim = 258;
        let Err(Refusal(lines)) = check_on_gpus(&source, &target) else {
            panic!("it is refused");
        };
        assert!(lines[0].contains("head_dim is 258"), "{lines:?}");
    }
}
