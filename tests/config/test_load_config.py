from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdmpi.config.load import load_config, parse_config
from pdmpi.config.run import RunConfig
from pdmpi.errors import InputError

REPOSITORY = Path(__file__).resolve().parents[2]

MINIMAL = """
[model]
factory = "torch.nn:Linear"
[data]
factory = "package.module:make"
[train]
minibatch_size = 32
epochs = 2
"""

KNOBS = [
    (table, key) for table, field in RunConfig.model_fields.items() for key in field.annotation.model_fields
]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problem(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        load_config(written(tmp_path, text))
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, MINIMAL))
    assert (config.train.minibatch_size, config.train.epochs, config.train.steps) == (32, 2, None)
    assert config.optimizer.args == {"lr": 0.1}
    assert config.schedule.name == "pipedream"


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs").glob("*.toml")), ids=lambda p: p.name)
def test_every_configuration_of_the_repository_loads(path: Path) -> None:
    assert load_config(path).train.minibatch_size > 0


def test_lists_and_whole_numbers_for_real_ones_are_taken(tmp_path: Path) -> None:
    text = MINIMAL.replace("[data]", 'leaves = ["encoder.layers.*"]\n[runtime]\nstall_timeout_s = 5\n[data]')
    config = load_config(written(tmp_path, text))
    assert config.model.leaves == ("encoder.layers.*",)
    assert config.runtime.stall_timeout_s == 5.0


def test_all_problems_at_once(tmp_path: Path) -> None:
    text = """
[model]
factory = "torch.nn.Linear"
leafs = ["x"]
[schedule]
microbatches = 3
recompute = "sometimes"
[train]
minibatch_size = 32
epochs = 3
steps = "4"
seed = -1
[outptu]
"""
    message = problem(tmp_path, text)
    for part in [
        '[model] factory = "torch.nn.Linear": must be written "module:callable"',
        "unknown key [model] leafs; did you mean 'leaves'?",
        "[data] is missing",
        "[schedule] recompute = \"sometimes\": must be 'never', 'except-last' or 'always'",
        '[train] steps = "4": must be a whole number',
        "[train] seed = -1: must be at least 0",
        "unknown table [outptu]; did you mean 'output'?",
        "epochs = 3 and steps = 4: keep one",
        "minibatch_size = 32 is not divisible by [schedule] microbatches = 3; set minibatch_size = 33",
    ]:
        assert part in message


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("epochs = 2", "", "[train] needs either epochs or steps"),
        ("minibatch_size = 32", "", "[train] minibatch_size is missing (Samples that go through"),
        ("minibatch_size = 32", 'minibatch_size = "32"', 'minibatch_size = "32": must be a whole number'),
        ("minibatch_size = 32", "minibatch_size = true", "minibatch_size = true: must be a whole number"),
        ("minibatch_size = 32", "minibatch_size = 0", "minibatch_size = 0: must be at least 1"),
        ("epochs = 2", "epochs = 2\ndtype = 'float31'", "[train] dtype = \"float31\": must be 'float32'"),
        ("[data]", "[runtime]\nstall_timeout_s = 0\n[data]", "stall_timeout_s = 0: must be more than 0"),
        ("[data]", "[schedule]\nextra_in_flight = 'much'\n[data]", "must be a whole number or 'auto'"),
        (
            "[data]",
            "[transport]\ndevice = 3\n[data]",
            "[transport] device = 3: must be 'auto', 'cuda' or 'host'",
        ),
        ("[model]", "model = 3\n[x]", "[model] = 3: must be a table"),
    ],
)
def test_one_problem(tmp_path: Path, old: str, new: str, expected: str) -> None:
    assert expected in problem(tmp_path, MINIMAL.replace(old, new))


@given(knob=st.sampled_from(KNOBS), data=st.data())
def test_a_misspelt_key_is_refused_with_the_right_one(knob: tuple[str, str], data: st.DataObject) -> None:
    table, key = knob
    place = data.draw(st.integers(0, len(key) - 1), label="place")
    typo = key[:place] + data.draw(st.sampled_from("qxz"), label="letter") + key[place:]
    given_keys = {
        "model": {"factory": "a:b"},
        "data": {"factory": "a:b"},
        "train": {"minibatch_size": 8, "steps": 1},
    }
    given_keys[table] = given_keys.get(table, {}) | {typo: 1}
    with pytest.raises(InputError) as caught:
        parse_config(given_keys, "run.toml")
    assert f"unknown key [{table}] {typo}; did you mean {key!r}?" in str(caught.value)


@given(st.binary(max_size=200))
def test_no_file_gives_a_traceback(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.toml"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"fuzzed\.toml"):
        load_config(path)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read configuration '.*none\.toml': No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(InputError, match="Is a directory"):
        load_config(tmp_path)
    with pytest.raises(InputError, match=r"no valid TOML: .*line 1"):
        load_config(written(tmp_path, "[model\n"))
