"""Tests of check-export.py on the golden files: python3 -m unittest scripts/test_check_export.py"""

import importlib.util
import io
import json
import sys
import tempfile
import unittest
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import tensorfile

spec = importlib.util.spec_from_file_location("check_export", HERE / "check-export.py")
check_export = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_export)

GOLDEN = HERE.parent / "tests" / "golden"


def golden_params():
    inputs = tensorfile.TensorFile(GOLDEN / "dflash_inputs.safetensors")
    return inputs, {name[len("param.") :]: inputs[name] for name in inputs if name.startswith("param.")}


def serving_config(golden):
    """The config.json that goes with a golden file's sizes; its target is made up."""
    extra = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "max_position_embeddings": 512,
        "num_target_layers": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": golden["rope_theta"]},
        "dflash_config": {"mask_token_id": golden["mask_token_id"], "target_layer_ids": [1, 3, 5]},
    }
    return {**{name: value for name, value in golden.items() if name != "mask_token_id"}, **extra}


class CheckExport(unittest.TestCase):
    def setUp(self):
        self.inputs, self.params = golden_params()
        self.config = serving_config(json.loads(self.inputs.metadata["config"]))
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.dir = Path(folder.name)

    def outcome(self, *options, bfloat16=True):
        """Exit code and output on an export of the present params and config."""
        (self.dir / "config.json").write_text(json.dumps(self.config))
        tensorfile.write(self.dir / "model.safetensors", self.params, bfloat16=bfloat16)
        sys.argv = ["check-export.py", str(self.dir), *map(str, options)]
        with redirect_stdout(io.StringIO()) as output:
            code = check_export.main()
        return code, output.getvalue()

    def assert_refused(self, text, **kwargs):
        code, output = self.outcome(**kwargs)
        self.assertEqual(code, 1, output)
        self.assertIn(text, output)

    def test_forward_equals_the_golden_hidden_states(self):
        for name in ("dflash_decay", "dflash_sliding"):
            golden = tensorfile.TensorFile(GOLDEN / f"{name}.safetensors")
            config = serving_config(json.loads(golden.metadata["config"]))
            arguments = (self.inputs[key] for key in ("embed", "ids", "ctx", "anchors"))
            hidden = check_export.drafter_hidden(self.params, config, *arguments)
            self.assertLess(np.abs(hidden - golden["hidden"]).max(), 2e-5, name)

    def test_an_export_passes_and_its_own_logits_agree(self):
        files = ["--inputs", GOLDEN / "dflash_inputs.safetensors", "--write", self.dir / "out.safetensors"]
        code, output = self.outcome(*files)
        self.assertEqual(code, 0, output)
        self.assertIn("36 tensors for 3 layers", output)
        code, output = self.outcome(*files[:2], "--expect", self.dir / "out.safetensors", "--tolerance", 1e-7)
        self.assertEqual(code, 0, output)
        # bfloat16 weights are near the golden float32 ones, but not within the tolerance for equal weights.
        golden = [*files[:2], "--expect", GOLDEN / "dflash_decay.safetensors"]
        self.assertEqual(self.outcome(*golden)[0], 1)
        code, output = self.outcome(*golden, "--tolerance", 0.03)
        self.assertEqual(code, 0, output)

    def test_a_wrong_weight_fails_the_comparison(self):
        files = ["--inputs", GOLDEN / "dflash_inputs.safetensors"]
        self.outcome(*files, "--write", self.dir / "out.safetensors")
        q = self.params["layers.1.self_attn.q_proj.weight"]
        self.params["layers.1.self_attn.q_proj.weight"] = np.roll(q, 1, axis=0)
        self.assertEqual(self.outcome(*files, "--expect", self.dir / "out.safetensors")[0], 1)

    def test_missing_unexpected_and_misshapen_tensors(self):
        self.params["model.extra"] = self.params.pop("layers.2.mlp.up_proj.weight")
        self.params["fc.weight"] = self.params["fc.weight"].T.copy()
        code, output = self.outcome()
        self.assertEqual(code, 1)
        self.assertIn("missing tensor layers.2.mlp.up_proj.weight", output)
        self.assertIn("unexpected tensor model.extra", output)
        self.assertIn("fc.weight has shape [192, 64], expected [64, 192]", output)

    def test_float32_tensors_and_nan(self):
        self.assert_refused("norm.weight has dtype F32, expected BF16", bfloat16=False)
        self.params["norm.weight"][3] = np.inf
        self.assert_refused("norm.weight holds NaN or infinite values")

    def test_each_config_field_is_needed(self):
        whole = dict(self.config)
        for field in whole:
            self.config = {name: value for name, value in whole.items() if name != field}
            self.assert_refused(field)

    def test_contradictions_in_the_config(self):
        whole = dict(self.config)
        for change, text in (
            ({"rope_theta": 5e5}, "rope_parameters has theta"),
            ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is null"),
            ({"layer_types": ["full_attention"]}, "one known type per layer"),
            ({"num_target_layers": 4}, "target layer 5 of 4"),
            ({"dflash_config": {"mask_token_id": 160, "target_layer_ids": [1, 3, 5]}}, "mask_token_id 160"),
            ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 5, 3]}}, "rising layer numbers"),
            ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ):
            self.config = {**whole, **change}
            self.assert_refused(text)

    def test_another_target_is_noticed(self):
        target = {"hidden_size": 64, "vocab_size": 160, "num_hidden_layers": 8, "max_position_embeddings": 512}
        (self.dir / "target").mkdir()
        (self.dir / "target" / "config.json").write_text(json.dumps(target))
        self.assertEqual(self.outcome("--target", self.dir / "target")[0], 0)
        (self.dir / "target" / "config.json").write_text(json.dumps({**target, "num_hidden_layers": 12}))
        code, output = self.outcome("--target", self.dir / "target")
        self.assertEqual(code, 1)
        self.assertIn("num_target_layers is 8", output)

    def test_a_truncated_file_cannot_be_read(self):
        self.outcome()
        data = (self.dir / "model.safetensors").read_bytes()
        for length in (5, 300, len(data) - 1):
            (self.dir / "cut.safetensors").write_bytes(data[:length])
            with self.assertRaises(ValueError):
                tensorfile.TensorFile(self.dir / "cut.safetensors")


if __name__ == "__main__":
    unittest.main()
