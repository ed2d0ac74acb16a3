"""Lists how vocabularies of byte-level BPE cut a text into words, by the name in a GGUF file (`pre`).

Source: the names, expressions and flags are those of llama.cpp's src/llama-vocab.cpp (b11434), and of the tokenizers
from which the models come.
"""

from __future__ import annotations

from dataclasses import dataclass

_SUFFIXES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
_KANA_AND_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_NOT_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"


@dataclass(frozen=True)
class PreTokenizer:
    """Says how a kind of vocabulary cuts texts into words before it merges tokens.

    Attributes:
        expressions: regular expressions. Each cuts the pieces of the expression before: every match is a piece, and so
            is the text between two matches.
        ignores_merges: True if a word that is a token is taken as this token, even if its merges would lead to others.
        adds_bos: whether texts begin with the BOS token if the file does not say so.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False


def _like_llama_3(
    digits: str, *, suffixes: str = f"{_SUFFIXES}|", letters: str = r"\p{L}", marks: str = r"\r\n"
) -> str:
    """Return the expression of Llama 3, or of a descendant that cuts digits and letters differently."""
    others = r"\s\p{L}\p{N}" if letters == r"\p{L}" else r"\s\p{L}\p{M}\p{N}"
    return rf"{suffixes}[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}| ?[^{others}]+[{marks}]*|{_SPACES}"


def _by_case(digits: str, suffix: str) -> str:
    """Return the expression of vocabularies that cut words where capitals begin, such as GPT-4o and Tekken."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{_UPPER}*{_LOWER}+{suffix}|{before}{_UPPER}+{_LOWER}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


def _without_han(expression: str) -> str:
    """Return the expression of Kimi's vocabularies: signs of Chinese are words of their own, and slashes end none."""
    for letters in (_UPPER, _LOWER):
        expression = expression.replace(letters, rf"{letters[:-1]}&&[^\p{{Han}}]]")
    return r"\p{Han}+|" + expression.replace(r"[\r\n/]*", r"[\r\n]*")


_LLAMA_3 = (_like_llama_3(r"\p{N}{1,3}"),)
_QWEN_2 = (_like_llama_3(r"\p{N}"),)
_DEEPSEEK_3 = (r"\p{N}{1,3}", _KANA_AND_HAN, rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}")
_CASED_LETTERS = (
    "[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943]"
)
_DIGITS_THEN_GPT2 = (r"\p{N}", _GPT2)
_JAIS_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
_ASCII_SUFFIXES_OF_BAILING = r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"

DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""The expressions that llama.cpp uses for files without `pre`. They are right for few of these files."""

_NAMED: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): DEFAULT,
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion",
     "granite-docling"):
        PreTokenizer((_GPT2,)),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"):
        PreTokenizer(_DIGITS_THEN_GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"):
        PreTokenizer(_LLAMA_3, ignores_merges=True, adds_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer(_LLAMA_3),
    ("glm4", "glm5"): PreTokenizer(_LLAMA_3, ignores_merges=True),
    ("jais-2",): PreTokenizer((_LLAMA_3[0].replace(_SPACES, rf"\s*[\r\n]+|{_JAIS_SPACES}|\s{{1}}"),)),
    ("minicpm5",): PreTokenizer((r"\p{N}{1,3}", _like_llama_3(r"\p{N}+")), ignores_merges=True),
    ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"):
        PreTokenizer(_QWEN_2),
    ("qwen35",): PreTokenizer((_like_llama_3(r"\p{N}", letters=r"[\p{L}\p{M}]"),)),
    ("ufakzeka",): PreTokenizer((_like_llama_3(r"\p{N}", suffixes=""),)),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", *_QWEN_2)),
    # The model's own tokenizer cuts off these letters everywhere; llama.cpp only after an apostrophe.
    ("seed-coder",): PreTokenizer((
        rf"(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    )),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer((
        _like_llama_3(r"\p{N}", suffixes=_ASCII_SUFFIXES_OF_BAILING).replace(r"\s*[\r\n]+", r"\s*[\r\n]"),
    )),
    ("exaone-moe",): PreTokenizer((
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )),
    ("tekken",): PreTokenizer((_by_case(r"\p{N}", ""),), ignores_merges=True, adds_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"):
        PreTokenizer((_by_case(r"\p{N}{1,3}", f"{_SUFFIXES}?"),)),
    ("kimi-k2",): PreTokenizer((_without_han(_by_case(r"\p{N}{1,3}", f"{_SUFFIXES}?")),)),
    ("tiny_aya", "cohere2moe"):
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _by_case(r"\p{N}{1,3}", f"{_SUFFIXES}?"))),
    ("youtu",): PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|" + _KANA_AND_HAN,
            _by_case(r"\p{N}", f"{_SUFFIXES}?"),
        ),
        ignores_merges=True,
    ),
    ("deepseek-llm",): PreTokenizer((
        r"[\r\n]", rf"\s?{_CASED_LETTERS}+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+",
        r"\p{N}+",
    )),
    ("deepseek-coder",): PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(_DEEPSEEK_3),
    ("spark2_5",): PreTokenizer((
        *_DEEPSEEK_3[:2], rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}",
    )),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_NOT_PUNCTUATION,)),
    ("viking",): PreTokenizer((_NOT_PUNCTUATION, r"\p{N}")),
}  # fmt: skip

PRE_TOKENIZERS = {name: own for names, own in _NAMED.items() for name in names}
"""Maps the value of `tokenizer.ggml.pre` to how texts are cut."""
