"""Add files outside docs/ to the site if a page links to them: Markdown as pages, everything else as downloads.

Pages keep the relative links that work in a checkout. The site path of a file is its repository path, without docs/ for
files in docs/. A link to a folder leads to the README.md of the folder.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\(\s*)([^)\s]+)")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)


def _repository_path(site_path: str) -> str:
    in_docs = f"docs/{site_path}"
    return in_docs if (ROOT / in_docs).is_file() else site_path


def _target(page: str, link: str) -> str | None:
    """Return the repository path of a relative link, or None for other links. page: the page's repository path."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    return posixpath.join(path, "README.md") if (ROOT / path / "README.md").is_file() else path


def _site_path(path: str) -> str:
    return path.removeprefix("docs/")


def on_files(files, config):
    """Add the linked files, and the files that those link to."""
    nav = re.findall(r"[\w/]+\.md", str(config.nav))
    missing = [path for path in nav if (ROOT / path).is_file() and not files.get_file_from_path(path)]
    for path in missing:
        files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
    pages = [_repository_path(file.src_uri) for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for _, link in LINK.findall(CODE.sub("", (ROOT / page).read_text())):
            path = _target(page, link)
            if path is None or path.startswith(("docs/", "../")) or not (ROOT / path).is_file():
                continue
            if files.get_file_from_path(path) is None:
                files.append(File(path, str(ROOT), config.site_dir, config.use_directory_urls))
                if path.endswith(".md"):
                    pages.append(path)
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrite relative links from repository paths to site paths."""
    own = _repository_path(page.file.src_uri)

    def rewritten(match: re.Match) -> str:
        path = _target(own, match[2])
        if path is None:
            return match[0]
        fragment = match[2].partition("#")[1:]
        site = posixpath.relpath(_site_path(path), posixpath.dirname(page.file.src_uri) or ".")
        return match[1] + site + "".join(fragment)

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(rewritten, part) for index, part in enumerate(parts))
