"""Recipes are read strictly, and what is wrong is named."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from tests.pipeline.line import write_recipe
from twofold.pipeline.recipe import Recipe, builtin_recipes, find_recipe, load_config, load_recipe, read_recipe


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    betas: tuple[float, float] = (0.9, 0.95)
    sizes: tuple[int, ...] = ()
    method: Literal["round", "awq"] = "awq"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ValueError(f"rate = {self.rate} must not be negative")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    steps: int = 1
    flag: bool = False
    limit: int | None = None
    file: Path | None = None
    inner: Inner = field(default_factory=Inner)
    many: tuple[Inner, ...] = ()


def write(folder: Path, text: str) -> Path:
    file = folder / "a.toml"
    file.write_text(text)
    return file


def test_every_kind_of_field(tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text("")
    text = """
        name = "x"
        steps = 3
        flag = true
        limit = 4
        file = "data.txt"
        [inner]
        rate = 1
        betas = [0, 0.5]
        sizes = [1, 2, 3]
        method = "round"
        [[many]]
        rate = 0.25
    """
    assert read_recipe(write(tmp_path, text), Outer) == Outer(
        name="x",
        steps=3,
        flag=True,
        limit=4,
        file=tmp_path / "data.txt",
        inner=Inner(rate=1.0, betas=(0.0, 0.5), sizes=(1, 2, 3), method="round"),
        many=(Inner(rate=0.25),),
    )
    loaded = load_config(Inner, {"rate": 1}, "x")
    assert type(loaded.rate) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "x"\nstepz = 1', "a.toml: unknown key 'stepz'; did you mean 'steps'?"),
        ('name = "x"\n[inner]\nbetta = [1]', "a.toml [inner]: unknown key 'betta'; did you mean 'betas'?"),
        ('name = "x"\n[inner]\nq = 1', "unknown key 'q'; known are: rate, betas, sizes, method"),
        ("steps = 1", "a.toml: 'name' is missing; it has no default (string)"),
        ('name = "x"\nsteps = 1.5', "a.toml: steps = 1.5 should be int"),
        ('name = "x"\nsteps = true', "steps = true should be int"),
        ('name = "x"\nflag = 1', "flag = 1 should be true or false"),
        ('name = "x"\nlimit = "4"', 'limit = "4" should be int'),
        ("name = 1", "name = 1 should be string"),
        ('name = "x"\n[inner]\nrate = "fast"', 'a.toml [inner]: rate = "fast" should be float'),
        ('name = "x"\n[inner]\nrate = inf', "[inner]: rate = inf should be float"),
        ('name = "x"\n[inner]\nbetas = [0.9]', "betas = [0.9] should be a list of 2: float, float"),
        ('name = "x"\n[inner]\nsizes = [1, "2"]', 'sizes[1] = "2" should be int'),
        ('name = "x"\n[inner]\nmethod = "gptq"', 'method = "gptq" should be one of "round", "awq"'),
        ('name = "x"\n[inner]\nrate = -1', "a.toml [inner]: rate = -1.0 must not be negative"),
        ('name = "x"\ninner = 3', "inner = 3 should be a table"),
        ('name = "x"\nfile = "none.txt"', "none.txt; correct the path"),
        ('name = "x', "a.toml: not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        read_recipe(write(tmp_path, text), Outer)
    assert message in str(caught.value)


def test_find_recipe(tmp_path: Path) -> None:
    assert find_recipe("pocket") == builtin_recipes()["pocket"]
    file = write(tmp_path, "")
    assert find_recipe(str(file)) == file
    with pytest.raises(ValueError, match=r"no recipe 'pocke': .*; built in are: pocket"):
        find_recipe("pocke")


@pytest.mark.parametrize("name", builtin_recipes())
def test_built_in_recipes_are_whole(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe.model.is_dir()


@pytest.mark.parametrize("file", sorted((Path(__file__).parents[2] / "recipes").glob("*.toml")), ids=lambda f: f.stem)
def test_recipes_to_copy_are_whole(file: Path, tmp_path: Path) -> None:
    """Every key is known; only model and prompts are the user's to bring."""
    text = file.read_text()
    (tmp_path / tomllib.loads(text)["model"]).mkdir()
    for name in ("prompts.jsonl", "heldout.jsonl"):
        (tmp_path / name).touch()
    (tmp_path / file.name).write_text(text)
    assert load_recipe(str(tmp_path / file.name)).name == file.stem


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[draft_pretrain]", "[draft_pretrain]\nquantize = {}", "trains a dense drafter"),
        ("[draft_finetune]", "[draft_finetune]\nquantize = {}", "belong together"),
        ("[draft_quantize]", '[draft_quantize]\nmethod = "trained"', "belong together"),
    ],
)
def test_a_drafter_is_quantized_once(old: str, new: str, message: str) -> None:
    table = tomllib.loads(builtin_recipes()["pocket"].read_text().replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_config(Recipe, table, "pocket", base=builtin_recipes()["pocket"].parent)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "line"', 'name = "a/b"', r"line\.toml: name = \"a/b\" names a folder of a run; use a plain file name"),
        ('name = "line"', 'name = ".."', r"name = \"\.\.\" names a folder"),
        ("seed = 3", "seed = 4294967296", r"seed = 4294967296 is not from 0 to 4294967295"),
        ("seed = 3", "seed = -1", "seed = -1 is not from 0"),
        ("[quantize]\ngroup_size = 16", "[quantize]\ngroup_size = -16", r"\[quantize\]: group_size = -16 is no group"),
        (
            "steps = 4, learning_rate = 1e-3",
            "steps = 4, learning_rate = 0",
            r"\[distill\] \[optimizer\]: learning_rate = 0",
        ),
        ("steps = 4,", "steps = 4, betas = [0.9, 1],", r"\[optimizer\]: betas = \(0\.9, 1\.0\) are not in \[0, 1\)"),
        ("steps = 4,", "steps = 4, weight_decay = -1,", "weight_decay = -1.0 is negative"),
        ("steps = 4,", "steps = 4, final = 2,", "final = 2.0 is a share"),
        (
            "[distill]",
            '[distill]\nscales = "learned"\nscale_learning_rate = -1',
            r"\[distill\]: scale_learning_rate = -1\.0 learns nothing",
        ),
        ("lossless_prompts = 2", "lossless_prompts = 0", r"\[evaluate\]: .* lossless_prompts = 0: each is 1 or more"),
        ("short = [8, 4]", "short = [8, 0]", r"\[bench\]: short = \(8, 0\): 1 or more"),
    ],
)
def test_what_is_out_of_range_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = write_recipe(tmp_path)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=message):
        load_recipe(str(file))


def test_where_a_drafter_starts_is_asked_before_any_work(tmp_path: Path) -> None:
    file = write_recipe(tmp_path)
    file.write_text(file.read_text().replace('model = "model"', 'model = "model"\ndrafter = "model"'))
    with pytest.raises(ValueError, match="give either `drafter`"):
        load_recipe(str(file))
