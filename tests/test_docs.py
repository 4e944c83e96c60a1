"""What the documentation says can be done can be done."""

import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from lucid_cli import cli
from lucid_optim import REASONS
from tools import gpu_tests

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += [ROOT / "packages" / name / "README.md" for name in ("optim", "profiler", "cli")]


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(group: click.Group, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], click.Command]:
    """Return every command below a group by its words."""
    context = click.Context(group)
    found: dict[tuple[str, ...], click.Command] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        words = (*path, name)
        found[words] = command
        if isinstance(command, click.Group):
            found |= commands(command, words)
    return found


def test_the_readme_s_program_runs_as_it_stands() -> None:
    """The thirty lines of MuSGD train, and are at most thirty."""
    (program,) = blocks(ROOT / "README.md", "python")
    assert len(program.splitlines()) <= 33
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    match = re.fullmatch(r"loss (\d\.\d+) \{'not_requested': 40\}\n", done.stdout)
    assert match
    assert float(match[1]) < 0.6


def test_every_command_line_in_the_pages_exists() -> None:
    """Commands and options that the pages use are known to the command line; make targets to the Makefile."""
    known = commands(cli)
    makefile = (ROOT / "Makefile").read_text()
    seen = set()
    for page in PAGES:
        for line in "\n".join(blocks(page, "")).splitlines():
            words = line.removeprefix("$ ").split("#")[0].split()
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), (page, line)
            if words[:1] == ["lucid"]:
                path = next((at for n in (4, 3) if (at := tuple(words[1:n])) in known), ())
                assert path in known, (page, line)
                seen.add(path)
                first = len(path) + 1
                own = words[first : words.index("--")] if "--" in words else words[first:]
                options = {option for parameter in known[path].params for option in parameter.opts}
                assert {word for word in own if word.startswith("-")} <= options, (page, line)
    assert seen == {path for path, command in known.items() if not isinstance(command, click.Group)}


@pytest.mark.parametrize("words", sorted(commands(cli)), ids=" ".join)
def test_every_command_and_option_explains_itself(words: tuple[str, ...]) -> None:
    """No command and no option without help."""
    command = commands(cli)[words]
    assert command.help
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """Relative links name files that exist."""
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_every_reason_is_explained_in_the_pages() -> None:
    """The page on capture lists each reason with the words that the log and the errors use."""
    page = (ROOT / "docs" / "capture.md").read_text()
    for reason, text in REASONS.items():
        assert f"| `{reason}` | {text} |" in page, reason


def test_the_readme_names_what_the_gpu_tests_ran_on() -> None:
    """The README quotes the evidence, word for word, or says that there is none."""
    readme = " ".join((ROOT / "README.md").read_text().split())
    if not gpu_tests.EVIDENCE.exists():
        assert "These sources have not passed all of them on a GPU yet" in readme
        return
    evidence = json.loads(gpu_tests.EVIDENCE.read_text())
    assert gpu_tests.sentence(evidence) in readme
    assert evidence["passed"] > 100
    assert evidence["failed"] == evidence["skipped"] == 0


def test_the_digest_of_the_sources_follows_every_byte(tmp_path: Path) -> None:
    """Another byte, another name, or another file is another digest; what is no source is none."""
    source = tmp_path / "packages" / "optim" / "src" / "lucid_optim"
    source.mkdir(parents=True)
    (source / "a.py").write_text("x = 1\n")
    digests = [gpu_tests.digest(tmp_path)]
    (source / "a.py").write_text("x = 2\n")
    digests.append(gpu_tests.digest(tmp_path))
    (source / "b.py").write_text("")
    digests.append(gpu_tests.digest(tmp_path))
    (source / "b.py").rename(source / "c.py")
    digests.append(gpu_tests.digest(tmp_path))
    assert len(set(digests)) == 4
    (source / "notes.txt").write_text("no source")
    assert gpu_tests.digest(tmp_path) == digests[-1]
