"""How Sphinx builds these pages: ``python -m sphinx -W --keep-going -b html docs docs/_build``."""

import re

import fusedseg

project = "fusedseg"
author = "fusedseg contributors"
copyright = author  # noqa: A001  Sphinx reads this name
version = release = fusedseg.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# The pages are also read in the repository, so their links name Markdown files and headings.
myst_heading_anchors = 3

# The reference has the integrations also where their frameworks are not installed.
autodoc_mock_imports = ["monai"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autoclass_content = "class"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = False

html_theme = "pydata_sphinx_theme"
html_title = f"fusedseg {version}"
html_show_copyright = False
html_show_sourcelink = False
# Nothing is loaded from another host: the site works without a network.
html_theme_options = {
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": [],
}
# The public address of the repository, which has none yet.  docs/contributing.md lists the other places that need it.
REPOSITORY = ""
if REPOSITORY:
    html_theme_options["icon_links"] = [{"name": "Repository", "url": REPOSITORY, "icon": "fa-solid fa-code-branch"}]
html_sidebars = {"**": ["globaltoc.html"]}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("scroll.js", {"defer": "defer"})]


# What may change with each minor version (docs/stability.md).  A name stands for its members too.  Every other name of
# the reference is stable.
EXPERIMENTAL = (
    "fusedseg.ConvHead2d",
    "fusedseg.ConvHead3d",
    "fusedseg.compiler",
    "fusedseg.functional",
    "fusedseg.integrations",
    "fusedseg.memory.Footprint",
    "fusedseg.memory.SavedBytes",
    "fusedseg.memory.allocator_peak",
    "fusedseg.memory.checkpoint_blocks",
    "fusedseg.memory.fake_mode",
    "fusedseg.memory.measure",
    "fusedseg.nn",
    "fusedseg.plan",
    "fusedseg.planning",
    "fusedseg.profile",
    "fusedseg.unet.lidar_optical_unet",
    "fusedseg.unet.unet3d_large",
    "fusedseg.unet.unet3d_small",
)


def mark_stability(app, what, name, obj, options, lines):
    """Begins the text of each function and class with *Stable* or *Experimental*."""
    if what in ("class", "function"):
        experimental = any(name == one or name.startswith(f"{one}.") for one in EXPERIMENTAL)
        lines[:0] = ["*Experimental.*" if experimental else "*Stable.*", ""]


# a star before a word, and a bar on one side of a word: emphasis and substitutions in reStructuredText
FORMULA = re.compile(r"(?<![\w*])\*(?=\w)|(?<!\w)\|(?=\w)|(?<=\w)\|(?!\w)")


def escape_formulas(app, what, name, obj, options, lines):
    """Lets docstrings say ``(N, C, *spatial)`` and ``|x|`` as they are; text in double backticks is left alone."""
    for number, line in enumerate(lines):
        parts = re.split(r"(``.*?``)", line)
        parts[::2] = [FORMULA.sub(r"\\\g<0>", part) for part in parts[::2]]
        lines[number] = "".join(parts)


# a number and its unit, a date, a power of ten, and a name with a hyphen
UNITS = r"\d+(?:\.\d+)?\s(?:%|[KMG]i?B|GHz|ms|µs|ns|min|s)(?!\w)"
WHOLE = re.compile(rf"({UNITS}|\d+-\d\d-\d\d|\de-\d+|nnU-Net)")


# characters of code in a list, on a screen of 390 pixels
PHONE = 34
LONG_NAME = re.compile(r"\S{18,}")


def allow_breaks(name):
    """The text of a match with a possible line break after each dot, or after each underscore if it has no dot."""
    mark = "." if "." in name[0] else "_"
    return name[0].replace(mark, mark + "\u200b")


def choose_line_breaks(app, doctree, docname):
    """No line ends inside of a number and its unit, for example; a long name in a title may break between its parts."""
    # Sphinx brings it; tests read this file where Sphinx is not installed.
    from docutils import nodes

    for text in list(doctree.findall(nodes.Text)):
        if isinstance(text.parent, nodes.title):
            text.parent.replace(text, nodes.Text(LONG_NAME.sub(allow_breaks, text)))
        elif not isinstance(text.parent, nodes.literal | nodes.FixedTextElement | nodes.raw | nodes.comment):
            parts = [nodes.Text(part) for part in WHOLE.split(text)]
            parts[1::2] = [nodes.inline("", "", part, classes=["whole"]) for part in parts[1::2]]
            if len(parts) > 1:
                text.parent.replace(text, [part for part in parts if part.astext()])
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > PHONE:
            code["classes"].append("long")


def skip_fields(app, what, name, obj, skip, options):
    """Leaves out the fields of a named tuple, about which Python says only "Alias for field number 0"."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app):
    app.connect("autodoc-skip-member", skip_fields)
    app.connect("doctree-resolved", choose_line_breaks)
    app.connect("autodoc-process-docstring", escape_formulas, priority=400)
    # Last, so that the sections of a docstring are read as they are.
    app.connect("autodoc-process-docstring", mark_stability, priority=900)
    return {"parallel_read_safe": True}
