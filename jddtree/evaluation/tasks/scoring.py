"""How answers are read and compared, as the data sets define it: numbers, boxed formulas, code blocks,
pass@k.

Pure functions of text. They raise for nothing that a model may write.
"""

import re
from decimal import Decimal
from functools import cache

from markdown_it import MarkdownIt

DIGITS = r"(?:\\?\$-?)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
NUMBER = re.compile(rf"(?:(?<![\w)}}])-)?{DIGITS}")
FINAL_NUMBER = re.compile(rf"####(?:[\s*_`:=~(){{}}\[\]$]|\\(?:boxed|fbox)|\\[(\[])*(-?{DIGITS})")
TEXT = r"\\(?:text(?:rm|bf|it)?|mbox|hbox|math(?:rm|bf|it|sf|tt|ord|punct|bin))\s*"
THIN_SPACE = r"(?:\\[,;:>! ]|\\(?:neg)?(?:thin|med|thick)space\b|[~\u00a0\u2009\u202f])"
TIGHT_COMMA = r"(?<=\d) *+(?:\\! *+)*(?:\{ *+, *+\}|, *+\\!|(?<=!),|(?<=! ),) *+(?:\\[!,] *+)*+"
THOUSANDS = r"(?=\d\d\d(?!\d))"
# In this order: what LaTeX puts between the digits of one number, so that only digits, signs and plain commas
# stay.
NUMBER_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("\u2212", "-"),
        (TEXT + r"\{([^{}]*)\}", r"\1"),
        (TIGHT_COMMA + THOUSANDS, ""),
        (TIGHT_COMMA + r"(?=\d)", ","),
        (rf"(?<=\d)(?<!\d{{4}})(?: *+\{{?+ *+{THIN_SPACE} *+\}}?+)++{THOUSANDS}", ""),
        (r"(?<=\d)\{\}(?=\d)", ""),
        (r"(?<=\d)\{\.\}(?=\d)", "."),
    )
)
# A word in \text at the end: behind anything if it begins with a space, else behind a digit only.
UNIT = re.compile(
    rf"(?:(?<=.){TEXT}\{{\s[^{{}}]*\}}|(?<=\d)(?:\s|{THIN_SPACE})*{TEXT}\{{[a-zA-Z][^{{}}]*\}})"
    r"(?:\^\{?\d\}?)?$"
)
LONGEST_FORMULA = 2000
PYTHON = ("", "py", "python", "python3")


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt ends inside the model's thinking."""
    return prompt.rstrip().endswith("<think>")


def thinks_to_the_end(answer: str, opened: bool = False) -> bool:
    """Whether an answer ends inside its thinking. opened: the prompt began it; otherwise the answer may."""
    return (opened or answer.lstrip().startswith("<think>")) and "</think>" not in answer


def after_thinking(answer: str) -> str:
    """What follows the model's thinking: all of an answer without any, nothing of one that began it and did
    not end.
    """
    return "" if thinks_to_the_end(answer) else answer.rsplit("</think>", 1)[-1]


def before_stops(answer: str, stops: tuple[str, ...]) -> str:
    """The answer up to the first of the strings that end it."""
    return answer[: min((place for stop in stops if (place := answer.find(stop)) >= 0), default=len(answer))]


def code_block(answer: str) -> str:
    """The first fenced block of Python or of no language, otherwise the first of any, otherwise the text
    between [BEGIN] and [DONE], otherwise the whole answer.

    Fences are those of CommonMark 4.5, but they count inside HTML too, since models write tags around
    programs.
    """
    blocks = [token for token in _markdown().parse(answer) if token.type == "fence"]
    python = [block for block in blocks if _language(block.info) in PYTHON]
    if blocks:
        return (python or blocks)[0].content.rstrip("\n")
    return answer.rsplit("[BEGIN]", 1)[-1].split("[DONE]", 1)[0]


@cache
def _markdown() -> MarkdownIt:
    parser = MarkdownIt("commonmark").disable("html_block")
    parser.core.ruler.disable("inline")
    return parser


def _language(info: str) -> str:
    """The language that an info string names: `python title="a"`, `{.python}` and `Python:a.py` are all
    python.
    """
    return (
        re.sub(r"^[\s{.]+", "", info.lower())
        .partition(" ")[0]
        .rstrip("}")
        .partition(":")[0]
        .partition(",")[0]
    )


def last_tagged(answer: str, tag: str) -> str | None:
    """What stands between the last <tag> and the </tag> behind it, without spaces around; None without such a
    pair.
    """
    found = re.findall(f"<{tag}>(.*?)</{tag}>", answer, re.DOTALL)
    return found[-1].strip() if found else None


def final_number(answer: str) -> Decimal | None:
    """The number behind the last `####` (GSM8K's own form), otherwise the last number; None without any."""
    text = plain_numbers(answer)
    found = FINAL_NUMBER.findall(text) or NUMBER.findall(text)
    return Decimal(re.sub(r"[\\$,]", "", found[-1])) if found else None


def plain_numbers(text: str) -> str:
    r"""The text with plain digits where LaTeX wrote 9{,}500, 9,\!500, 9\,500 and 9\text{,}500."""
    for pattern, replacement in (*NUMBER_RULES, *NUMBER_RULES):
        text = pattern.sub(replacement, text)
    return text


def last_boxed(answer: str) -> str | None:
    r"""What the last \boxed or \fbox holds, with braces or one bare symbol; None without one that is
    closed.
    """
    start = max(answer.rfind("\\boxed"), answer.rfind("\\fbox"))
    if start < 0:
        return None
    rest = answer[start:].split("box", 1)[-1].removeprefix("ed").lstrip()
    return _braced(rest) if rest.startswith("{") else (rest[:1].strip("$") or None)


def _braced(text: str) -> str | None:
    depth = 0
    for place, symbol in enumerate(text):
        depth += (symbol == "{") - (symbol == "}")
        if depth == 0:
            return text[1:place]
    return None


# Applied in this order to a formula without its spaces: what is written in two ways comes out in one.
FORMULA_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad\b|\s+|\\displaystyle", ""),
        (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\{?\\circ\}?|\\degree\b|\\\$|\$|\\?%", ""),
        (r"\\(?:text|mbox|textbf|mathrm|mathbf|textit)\{([^{}]*)\}", r"\1"),
        (r"\\sqrt([^\[{\\])", r"\\sqrt{\1}"),
        (r"\\frac([0-9a-zA-Z])([0-9a-zA-Z])", r"\\frac{\1}{\2}"),
        (r"\\frac([0-9a-zA-Z])\{", r"\\frac{\1}{"),
        (r"\\frac(\{[^{}]*\})([0-9a-zA-Z])", r"\\frac\1{\2}"),
        (r"^(-?)(\d+)/(\d+)$", r"\1\\frac{\2}{\3}"),
        (r"^(-?)0?\.50*$", r"\1\\frac{1}{2}"),
        (r"(^|[^\d])\.(\d)", r"\g<1>0.\2"),
        (r"^\\frac\{-(\d+)\}\{(\d+)\}$", r"-\\frac{\1}{\2}"),
        (r"^(-?\d+\.\d*?)0+$", r"\1"),
        (r"^[a-zA-Z]{1,2}(?:\([a-z]\))?=(?=.)|\.$", ""),
    )
)


def normal_formula(formula: str) -> str:
    r"""A formula in one spelling, in the spirit of MATH's `is_equiv` but with rules of our own: without
    spaces, sizes of brackets, units (`\text{ cm}` at the end), degree, dollar and percent signs, a leading `x
    =`; \dfrac, \frac12, 1/2 and 0.5 become \frac{1}{2}; 1,000 and 1{,}000 become 1000. The value is not
    computed: 2/4 is not 1/2.
    """
    text = plain_numbers(UNIT.sub("", formula[:LONGEST_FORMULA].strip()))
    for pattern, replacement in FORMULA_RULES:
        text = pattern.sub(replacement, text)
    return text.replace(",", "") if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text) else text


def same_formula(one: str, other: str) -> bool:
    """Whether two formulas are written the same after `normal_formula`."""
    return normal_formula(one) == normal_formula(other)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Probability that at least one of k samples passes, from `passed` of `samples` that did: the unbiased
    estimate 1 - C(samples - passed, k) / C(samples, k) of Chen et al. 2021. ValueError unless passed, k <=
    samples and k >= 1.
    """
    if not (0 <= passed <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass@k needs 0 <= passed <= samples and 1 <= k <= samples, not {passed}, {samples}, {k}"
        )
    all_fail = 1.0
    for row in range(samples - passed + 1, samples + 1):
        all_fail *= max(0.0, 1.0 - k / row)
    return 1.0 - all_fail
