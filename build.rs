//! Names the commit that is built, for `launcher --version`.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let commit = git(&["rev-parse", "--short=12", "HEAD"]).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rustc-env=SLIPSTREAM_COMMIT={commit}");
    // The log of HEAD grows with every commit, checkout and rebase, in a worktree too.
    for name in ["logs/HEAD", "HEAD"] {
        if let Some(path) =
            git(&["rev-parse", "--git-path", name]).filter(|path| Path::new(path).exists())
        {
            println!("cargo:rerun-if-changed={path}");
            break;
        }
    }
}

fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
