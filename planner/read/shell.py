"""Bash scripts as the commands that they would run, resolved as far as text alone says it: nothing is run.

Every character knows its place in the file through quotes, variables and arrays, so that a value can be replaced where
it is written. Of branches the first one counts, of loops the first round; a command substitution stays what it is, and
its words are marked as not resolved.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from hardware_db.errors import BrokenFile
from hardware_db.records import dataclass
from planner.read.form import Source

Letters = list[tuple[str, int]]
"""Characters, each with its place in the file; -1 where it has none."""

MOST_WORDS = 20_000
MOST_LETTERS = 200_000
"""Of one word: variables that double each other end here."""
MOST_DEPTH = 20
"""Of `bash -c` and `eval` in each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """A word of a command after expansion."""

    text: str
    line: int
    start: int = -1
    """Where it is written, -1 where it is put together from several places."""
    end: int = -1
    is_resolved: bool = True
    """False where only running the script would give it."""
    is_quoted: bool = False
    places: tuple[int, ...] = ()
    """Place of every character."""

    def tail(self, length: int) -> Word:
        """Return the last characters of it as a word: the value of `--flag=value`."""
        places = self.places[len(self.places) - length :]
        straight = _is_straight(places)
        return Word(
            text=self.text[len(self.text) - length :],
            line=self.line,
            start=places[0] if straight else -1,
            end=places[-1] + 1 if straight else -1,
            is_resolved=self.is_resolved,
            is_quoted=self.is_quoted,
            places=places,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """A command with the variables that were set when it ran."""

    words: tuple[Word, ...]
    variables: dict[str, Word]
    """Scalars only; arrays are in words that use them."""
    is_cut: bool = False
    """True where a comment ends it in the middle of its continued lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """Commands in the order in which they stand, and the files that the script writes from its own text."""

    source: Source
    commands: tuple[Command, ...]
    written: dict[str, Source]
    """By the name that a heredoc is redirected to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Letters of a word with what held them: bare ones are split at spaces."""

    letters: Letters
    is_quoted: bool
    is_resolved: bool = True


_Value = list[list[_Piece]]
"""Elements of a variable: one of a scalar, several of an array."""

_OPERATORS = ("&&", "||", ";;", "|&", "<<<", "<<-", "<<", ">>", "&>>", "&>", ">&", "<&", "<", ">", "|", "&", ";")
_ENDS = frozenset({"&&", "||", ";;", "|&", "|", "&", ";", "\n", "(", ")"})
_REDIRECTIONS = frozenset({"<<<", ">>", "&>>", "&>", ">&", "<&", "<", ">"})
_KEYWORDS = frozenset(
    {"then", "do", "else", "elif", "fi", "done", "esac", "{", "}", "!", "time", "if", "while", "until"}
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ARGUMENT = re.compile(r"\$\{?[0-9]\}?")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")


def parse_script(source: Source, variables: dict[str, str] | None = None) -> Script:
    """Return the commands of a script.

    Raises:
        BrokenFile: a quote or a bracket is never closed, or its variables grow without end.
    """
    run = _Run(source)
    for name, value in (variables or {}).items():
        run.values[name] = [[_Piece(letters=[(letter, -1) for letter in value], is_quoted=False)]]
    run.read(source.text, 0, 0)
    return Script(source=source, commands=tuple(run.commands), written=run.written)


class _Run:
    """Walks through a script's text."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[str, _Value] = {}
        self.commands: list[Command] = []
        self.written: dict[str, Source] = {}
        self.branch = 0
        self.seen_words = 0

    def broken(self, problem: str, offset: int) -> BrokenFile:
        """Return the error for a text that bash could not read either."""
        line = self.source.line_of(offset)
        return BrokenFile(f"{self.source.path}, line {line}", problem, "correct it there")

    # Text into words and operators.

    def read(self, text: str, base: int, depth: int) -> None:
        """Read a text whose first character is at `base` of the file, or nowhere where `base` is negative."""
        if depth > MOST_DEPTH:
            raise BrokenFile(
                self.source.path, f"has commands in commands more than {MOST_DEPTH} deep", "write them out"
            )
        reader = _Reader(self, text, base)
        words: list[list[_Piece]] = []
        heredocs: list[str] = []
        target: list[str] = []
        while True:
            token = reader.next(heredocs, target)
            if isinstance(token, list):
                words.append(token)
                self.seen_words += 1
                if self.seen_words > MOST_WORDS:
                    raise BrokenFile(self.source.path, f"has more than {MOST_WORDS:,} words", "name the script alone")
                continue
            if heredocs and token in ("\n", ""):
                for delimiter in heredocs:
                    self._take_heredoc(words, target, *reader.heredoc(delimiter))
                heredocs, target = [], []
            if words:
                self._end(words, reader.is_cut, depth)
                words = []
            if token == "":
                return

    def _take_heredoc(self, words: list[list[_Piece]], target: list[str], body: str, start: int) -> None:
        """Keep a heredoc that goes to a file or, by `read`, into a variable; its own variables are expanded."""
        pieces = _Reader(self, body, start).double_quoted_all()
        if target:
            text = "".join(letter for piece in pieces for letter, _ in piece.letters)
            self.written[target[-1]] = replace(
                self.source, path=f"{self.source.path} ({target[-1]})", text=text, is_file=True
            )
        elif words and _literal(words[0]) == "read":
            self.values[_literal(words[-1])] = [_without_continuations(pieces)]
            words.clear()

    # Commands.

    def _end(self, words: list[list[_Piece]], is_cut: bool, depth: int) -> None:
        """Take in one command: assignments, a keyword or a program."""
        while words and (keyword := _literal(words[0])) in _KEYWORDS:
            self.branch += {"if": 1, "fi": -1}.get(keyword, 0)
            words = words[1:]
            if keyword in ("if", "elif", "while", "until"):
                return  # a condition
        if not words:
            return
        first = _literal(words[0])
        if first in ("for", "select"):
            self._loop(words)
            return
        if first == "case":
            self.branch += 1
            return
        if first == "esac":
            self.branch -= 1
            return
        if first in ("export", "declare", "local", "readonly", "typeset"):
            for word in words[1:]:
                self._assign(word)
            return
        prefix: dict[str, _Value] = {}
        while words and (assignment := self._split_assignment(words[0])) is not None:
            name, value, appends = assignment
            if len(words) == 1 and not prefix:
                self._set(name, value, appends)
                return
            prefix[name] = value
            words = words[1:]
        if not words:
            for name, value in prefix.items():
                self._set(name, value, False)
            return
        self._run_program(words, prefix, is_cut, depth)

    def _run_program(self, words: list[list[_Piece]], prefix: dict[str, _Value], is_cut: bool, depth: int) -> None:
        expanded = [word for raw in words for word in self._expand(raw)]
        if not expanded:
            return
        program = expanded[0].text
        if program in ("eval", "bash", "sh") or (program == "srun" and any(word.text == "-c" for word in expanded)):
            inner = self._inner(raw for raw in words)
            if inner is not None:
                before = len(self.commands)
                self.read(*inner, depth + 1)
                if program == "srun":  # its own flags say how many ranks there are
                    head = tuple(word for word in expanded if len(word.text) < 200 and "\n" not in word.text)
                    for number in range(before, len(self.commands)):
                        command = self.commands[number]
                        joined = (*_launcher_words(head), *command.words)
                        self.commands[number] = Command(
                            words=joined, variables=command.variables, is_cut=command.is_cut
                        )
                return
        scalars = {name: value for name, value in {**self.values, **prefix}.items() if len(value) == 1}
        variables = {name: self._join(value[0]) for name, value in scalars.items()}
        self.commands.append(Command(words=tuple(expanded), variables=variables, is_cut=is_cut))

    def _inner(self, words: Iterator[list[_Piece]]) -> tuple[str, int] | None:
        """Return the text that `bash -c`, `eval` or `srun … bash -c` runs, with its place."""
        raw = list(words)
        names = [_literal(word) for word in raw]
        if names[0] == "eval":
            blank = _Piece(letters=[(" ", -1)], is_quoted=True)
            pieces = [piece for word in raw[1:] for piece in (*map(_in_one_line, word), blank)]
        elif "-c" in names and names.index("-c") + 1 < len(raw):
            pieces = raw[names.index("-c") + 1]
        else:
            return None
        letters = [letter for piece in pieces for letter in piece.letters]
        text = "".join(letter for letter, _ in letters)
        places = tuple(offset for _, offset in letters)
        return text, places[0] if _is_straight(places) else -1

    def _loop(self, words: list[list[_Piece]]) -> None:
        """Set a loop's variable to its first value."""
        if len(words) > 3 and _literal(words[2]) == "in":
            first = self._expand(words[3])
            if first and first[0].is_resolved:
                self.values[_literal(words[1])] = [words[3]]

    def _split_assignment(self, word: list[_Piece]) -> tuple[str, _Value, bool] | None:
        """Return name and value of `NAME=value`; None of any other word."""
        if not word or word[0].is_quoted:
            return None
        head = "".join(letter for letter, _ in word[0].letters)
        match = _ASSIGNMENT.match(head)
        if match is None:
            return None
        rest = word[0].letters[match.end() :]
        if rest and rest[0][0] == "\0":  # an array, whose elements the reader put behind this mark
            return match[1], self._elements(word), match[3] == "+"
        pieces = [_Piece(letters=rest, is_quoted=False), *word[1:]] if rest else list(word[1:])
        return match[1], [pieces], match[3] == "+"

    def _elements(self, word: list[_Piece]) -> _Value:
        elements: _Value = [[]]
        for piece in word[1:]:
            if piece.letters and piece.letters[0][0] == "\0":
                elements.append([])
            else:
                elements[-1].append(piece)
        return [element for element in elements if element]

    def _assign(self, word: list[_Piece]) -> None:
        assignment = self._split_assignment(word)
        if assignment is not None:
            self._set(*assignment)

    def _set(self, name: str, value: _Value, appends: bool) -> None:
        if appends and name in self.values:
            before = self.values[name]
            self.values[name] = [*before, *value] if len(value) != 1 or len(before) != 1 else [before[0] + value[0]]
        elif self.branch <= 0 or name not in self.values or self._is_argument(name):
            self.values[name] = value

    def _is_argument(self, name: str) -> bool:
        """Return whether a variable has nothing but an argument of the script, whose default a branch may set."""
        pieces = [piece for element in self.values[name] for piece in element]
        return len(pieces) == 1 and _ARGUMENT.fullmatch(_literal(pieces)) is not None

    # Expanded words.

    def _expand(self, word: list[_Piece]) -> list[Word]:
        """Return the words that a word becomes: bare expansions are split at spaces, arrays give one each."""
        groups: list[list[_Piece]] = [[]]
        for piece in word:
            if piece.letters and piece.letters[0][0] == "\0":
                groups.append([])
            elif piece.is_quoted:
                groups[-1].append(piece)
            else:
                self._split(piece, groups)
        return [
            self._join(group) for group in groups if group and (group[0].is_quoted or any(p.letters for p in group))
        ]

    def _split(self, piece: _Piece, groups: list[list[_Piece]]) -> None:
        current: Letters = []
        for letter, offset in piece.letters:
            if letter not in " \t\n\r":
                current.append((letter, offset))
                continue
            if current:
                groups[-1].append(_Piece(letters=current, is_quoted=False, is_resolved=piece.is_resolved))
                current = []
            if groups[-1]:
                groups.append([])
        if current:
            groups[-1].append(_Piece(letters=current, is_quoted=False, is_resolved=piece.is_resolved))

    def _join(self, pieces: Sequence[_Piece]) -> Word:
        letters = [letter for piece in pieces for letter in piece.letters]
        places = tuple(offset for _, offset in letters)
        straight = _is_straight(places)
        anywhere = next((offset for offset in places if offset >= 0), 0)
        return Word(
            text="".join(letter for letter, _ in letters),
            line=self.source.line_of(anywhere),
            start=places[0] if straight else -1,
            end=places[-1] + 1 if straight else -1,
            is_resolved=all(piece.is_resolved for piece in pieces),
            is_quoted=any(piece.is_quoted for piece in pieces),
            places=places,
        )


def _is_straight(places: tuple[int, ...]) -> bool:
    """Return whether characters stand side by side in the file."""
    return bool(places) and places[0] >= 0 and places[-1] - places[0] == len(places) - 1 and min(places) >= 0


class _Reader:
    """Reads one text into words, which are lists of pieces, and operators."""

    def __init__(self, run: _Run, text: str, base: int) -> None:
        self.run, self.text, self.base, self.position = run, text, base, 0
        self.is_cut = False
        self._continued = False

    def place_of(self, position: int) -> int:
        """Return the place in the file of a position in this text."""
        return self.base + position if self.base >= 0 else -1

    def next(self, heredocs: list[str], target: list[str]) -> list[_Piece] | str:
        """Return the next word, or the operator that ends a command; empty at the end of the text."""
        while True:
            self._skip_space()
            if self.position >= len(self.text):
                return ""
            letter = self.text[self.position]
            if letter == "#":
                self.is_cut = self._continued
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
                continue
            if letter == "\n":
                self.position += 1
                self._continued = False
                return "\n"
            if letter in "()":
                self.position += 1
                if letter == "(" and self.text.startswith("(", self.position):
                    self.position = self._close("))", self.position + 1)
                    continue
                return letter
            symbol = next((item for item in _OPERATORS if self.text.startswith(item, self.position)), None)
            if symbol is None:
                self.is_cut = False
                word = self.word()
                if _literal(word).isdigit() and self.text[self.position : self.position + 1] in ("<", ">"):
                    continue  # the number of a stream that is redirected
                return word
            self.position += len(symbol)
            if symbol in ("<<", "<<-"):
                self._skip_space()
                heredocs.append("".join(letter for piece in self.word() for letter, _ in piece.letters))
            elif symbol in _REDIRECTIONS:
                self._skip_space()
                if self.position < len(self.text) and self.text[self.position] not in "\n;&|(":
                    name = "".join(letter for piece in self.word() for letter, _ in piece.letters)
                    if symbol in (">", ">>"):
                        target.append(name)
            elif symbol in _ENDS:
                return symbol

    def _skip_space(self) -> None:
        while self.position < len(self.text):
            if self.text[self.position] in " \t\r":
                self.position += 1
            elif match := re.compile(r"\\\r?\n").match(self.text, self.position):
                self.position = match.end()
                self._continued = True
            else:
                return

    def word(self) -> list[_Piece]:
        """Return the word that begins here."""
        pieces: list[_Piece] = []
        bare: Letters = []

        def close_bare() -> None:
            if bare:
                pieces.append(_Piece(letters=bare.copy(), is_quoted=False))
                bare.clear()

        while self.position < len(self.text):
            letter, offset = self.text[self.position], self.place_of(self.position)
            if letter in " \t\r\n;&|<>)":
                break
            if letter == "(":
                head = "".join(text for text, _ in bare)
                if _ASSIGNMENT.fullmatch(head) and not pieces:
                    bare.append(("\0", -1))
                    close_bare()
                    pieces += self._array()
                elif bare and self.text.startswith("()", self.position):
                    self.position += 2
                    bare.clear()
                    return [_Piece(letters=[], is_quoted=False)]
                break
            self.position += 1
            if letter == "\\":
                if self.position < len(self.text):
                    if self.text[self.position] != "\n":
                        bare.append((self.text[self.position], self.place_of(self.position)))
                    self.position += 1
            elif letter == "'":
                close_bare()
                end = self.text.find("'", self.position)
                if end < 0:
                    raise self.run.broken("a quote ' is never closed", offset)
                pieces.append(_Piece(letters=self._slice(self.position, end), is_quoted=True))
                self.position = end + 1
            elif letter == '"':
                close_bare()
                pieces += self.double_quoted(offset)
            elif letter in "$`":
                close_bare()
                pieces += self.expansion(letter, is_quoted=False)
            else:
                bare.append((letter, offset))
        close_bare()
        return pieces

    def _slice(self, start: int, end: int) -> Letters:
        return [(self.text[index], self.place_of(index)) for index in range(start, end)]

    def _array(self) -> list[_Piece]:
        """Return the elements of `( … )`, each behind a mark."""
        opened = self.place_of(self.position)
        self.position += 1
        pieces: list[_Piece] = []
        while True:
            while self.position < len(self.text) and (self.text[self.position] in " \t\r\n"):
                self.position += 1
            self._skip_space()
            if self.position >= len(self.text):
                raise self.run.broken("a bracket ( is never closed", opened)
            letter = self.text[self.position]
            if letter == ")":
                self.position += 1
                return pieces
            if letter == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
                continue
            if letter == "\n":
                continue
            before = self.position
            pieces += [_Piece(letters=[("\0", -1)], is_quoted=True), *self.word()]
            if self.position == before:
                self.position += 1

    def double_quoted(self, opened: int) -> list[_Piece]:
        """Return the pieces between double quotes, the first of which was read."""
        pieces: list[_Piece] = [_Piece(letters=[], is_quoted=True)]
        plain: Letters = []
        while True:
            if self.position >= len(self.text):
                raise self.run.broken('a quote " is never closed', opened)
            letter, offset = self.text[self.position], self.place_of(self.position)
            self.position += 1
            if letter == '"':
                break
            if letter == "\\" and self.position < len(self.text):
                following = self.text[self.position]
                self.position += 1
                if following == "\n":
                    continue
                if following not in '$`"\\':
                    plain.append(("\\", offset))
                plain.append((following, self.place_of(self.position - 1)))
            elif letter in "$`":
                pieces.append(_Piece(letters=plain, is_quoted=True))
                plain = []
                pieces += self.expansion(letter, is_quoted=True)
            else:
                plain.append((letter, offset))
        pieces.append(_Piece(letters=plain, is_quoted=True))
        return pieces

    def double_quoted_all(self) -> list[_Piece]:
        """Return the pieces of the whole text, as between double quotes."""
        pieces: list[_Piece] = []
        while self.position < len(self.text):
            letter, offset = self.text[self.position], self.place_of(self.position)
            self.position += 1
            if letter in "$`":
                pieces += self.expansion(letter, is_quoted=True)
            else:
                pieces.append(_Piece(letters=[(letter, offset)], is_quoted=True))
        return pieces

    # Expansions.

    def expansion(self, sign: str, *, is_quoted: bool) -> list[_Piece]:
        """Return what `$…` or a backquote, whose sign was read, stands for."""
        start = self.position - 1
        if sign == "`":
            end = self.text.find("`", self.position)
            if end < 0:
                raise self.run.broken("a quote ` is never closed", self.place_of(start))
            self.position = end + 1
            return [self._unresolved(start)]
        if self.text.startswith("((", self.position):
            end = self._close("))", self.position + 2)
            text = self.text[self.position + 2 : end - 2]
            self.position = end
            value = self._arithmetic(text)
            if value is None:
                return [self._unresolved(start)]
            return [_Piece(letters=[(letter, -1) for letter in value], is_quoted=is_quoted)]
        if self.text.startswith("(", self.position):
            end = self._close(")", self.position + 1)
            inside = self.text[self.position + 1 : end - 1]
            self.position = end
            words = re.fullmatch(r"\s*expr\s+(.*)", inside, re.DOTALL)
            value = self._arithmetic(words[1].replace("\\*", "*")) if words else None
            if value is None:
                return [self._unresolved(start)]
            return [_Piece(letters=[(letter, -1) for letter in value], is_quoted=is_quoted)]
        if self.text.startswith("'", self.position) and not is_quoted:
            self.position += 1
            end = self.text.find("'", self.position)
            if end < 0:
                raise self.run.broken("a quote ' is never closed", self.place_of(start))
            letters = self._slice(self.position, end)
            self.position = end + 1
            return [_Piece(letters=letters, is_quoted=True)]
        if self.text.startswith("{", self.position):
            end = self._close("}", self.position + 1)
            inside = self.text[self.position + 1 : end - 1]
            self.position = end
            return self._parameter(inside, start, is_quoted=is_quoted)
        if match := _NAME.match(self.text, self.position):
            self.position = match.end()
            return self._variable(match[0], start, is_quoted=is_quoted)
        if self.position < len(self.text) and self.text[self.position] in "0123456789@*#?$!-":
            self.position += 1
            return [self._unresolved(start)]
        return [_Piece(letters=[("$", self.place_of(start))], is_quoted=is_quoted)]

    def _close(self, closing: str, position: int) -> int:
        """Return the position behind the bracket that closes what was opened before `position`."""
        opening = {")": "(", "}": "{", "))": "("}[closing]
        depth, start = len(closing) if closing == "))" else 1, position
        while position < len(self.text):
            letter = self.text[position]
            if letter == "\\":
                position += 1
            elif letter == "'" and closing == ")":
                end = self.text.find("'", position + 1)
                position = end if end > 0 else position
            elif letter == opening:
                depth += 1
            elif letter == closing[0]:
                depth -= 1
                if depth == 0:
                    return position + 1
            position += 1
        raise self.run.broken(f"a bracket {opening} is never closed", self.place_of(start))

    def _unresolved(self, start: int) -> _Piece:
        return _Piece(letters=self._slice(start, self.position), is_quoted=True, is_resolved=False)

    def _variable(self, name: str, start: int, *, is_quoted: bool, whole: bool = True) -> list[_Piece]:
        value = self.run.values.get(name)
        if value is None:
            return [self._unresolved(start)]
        marks: list[_Piece] = []
        for number, element in enumerate(value if whole else value[:1]):
            if number:
                marks.append(_Piece(letters=[("\0", -1)], is_quoted=True))
            marks += element if not is_quoted else [self._quote(piece) for piece in element]
            # What stood in quotes where a scalar was set is split where it is used bare.
            if not is_quoted and len(value) == 1:
                marks = [
                    _Piece(letters=p.letters, is_quoted=not p.is_resolved, is_resolved=p.is_resolved) for p in marks
                ]
        if sum(len(piece.letters) for piece in marks) > MOST_LETTERS:
            raise BrokenFile(self.run.source.path, f"the variable {name} grows without end", "write its value out")
        return marks

    def _quote(self, piece: _Piece) -> _Piece:
        return _Piece(letters=piece.letters, is_quoted=True, is_resolved=piece.is_resolved)

    def _parameter(self, inside: str, start: int, *, is_quoted: bool) -> list[_Piece]:
        """Return what `${…}` stands for: a variable, an array, or a variable with a default."""
        match = re.fullmatch(r"([A-Za-z_]\w*|[0-9]+|[@*])(\[[@*0-9]+\])?(?:(:?[-=+?])(.*))?", inside, re.DOTALL)
        if match is None:
            return [self._unresolved(start)]
        name, index, symbol, word = match.groups()
        value = self.run.values.get(name)
        if symbol and symbol.strip(":") in ("-", "=") and (value is None or not any(value)):
            inner_start = start + 2 + match.start(4)
            inner = _Reader(self.run, word, self.place_of(inner_start))
            pieces = self._strip_quotes(inner)
            if symbol.endswith("="):
                self.run.values[name] = [pieces]
            return [self._quote(piece) for piece in pieces] if is_quoted else pieces
        if symbol and symbol.endswith("+"):
            return [] if value is None else [_Piece(letters=[(letter, -1) for letter in word], is_quoted=is_quoted)]
        if value is None:
            return [self._unresolved(start)]
        return self._variable(name, start, is_quoted=is_quoted, whole=index is not None)

    def _strip_quotes(self, inner: _Reader) -> list[_Piece]:
        pieces: list[_Piece] = []
        while inner.position < len(inner.text):
            before = inner.position
            pieces += inner.word()
            if inner.position == before:
                pieces.append(_Piece(letters=inner._slice(before, before + 1), is_quoted=False))
                inner.position += 1
        return pieces

    def _arithmetic(self, text: str) -> str | None:
        """Return the result of whole numbers and variables with + - * / %; None where a part is not there."""
        names = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda match: f"({self._number(match[1])})", text)
        try:
            return str(_evaluate(ast.parse(names.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, KeyError, MemoryError):
            return None

    def _number(self, name: str) -> str:
        value = self.run.values.get(name)
        if not value:
            return "unset"
        text = "".join(letter for piece in value[0] for letter, _ in piece.letters)
        return text.strip() if re.fullmatch(r"\s*-?[0-9]{1,18}\s*", text) else "unset"

    def heredoc(self, delimiter: str) -> tuple[str, int]:
        """Return the lines up to a delimiter, with their place."""
        start = self.position
        match = re.compile(rf"^[ \t]*{re.escape(delimiter)}[ \t\r]*$", re.MULTILINE).search(self.text, start)
        if match is None:
            raise self.run.broken(f"the text up to {delimiter!r} never ends", self.place_of(start))
        self.position = match.end()
        return self.text[start : match.start()], self.place_of(start)


_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _evaluate(node: ast.expr) -> int:
    """Return the value of an expression of whole numbers.

    Raises:
        ValueError: it has anything else in it.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    raise ValueError("no arithmetic of whole numbers")


def _literal(word: Sequence[_Piece]) -> str:
    """Return the text of a word."""
    return "".join(letter for piece in word for letter, _ in piece.letters)


def _in_one_line(piece: _Piece) -> _Piece:
    """Return a bare piece with blanks for the ends of its lines, as splitting it at them and joining it again does."""
    if piece.is_quoted:
        return piece
    return replace(piece, letters=[(" " if letter == "\n" else letter, offset) for letter, offset in piece.letters])


def _without_continuations(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return pieces without backslashes that end a line, which a heredoc joins."""
    letters = [(*letter, piece.is_resolved) for piece in pieces for letter in piece.letters]
    kept: list[_Piece] = []
    skips = False
    for number, (letter, offset, is_resolved) in enumerate(letters):
        if skips:
            skips = False
            continue
        skips = letter == "\\" and number + 1 < len(letters) and letters[number + 1][0] == "\n"
        if not skips:
            kept.append(_Piece(letters=[(letter, offset)], is_quoted=False, is_resolved=is_resolved))
    return kept


def _launcher_words(words: Sequence[Word]) -> list[Word]:
    """Return a launcher and its flags, without the shell that it starts."""
    kept = []
    for word in words:
        if word.text in ("bash", "sh", "/bin/bash", "/bin/sh"):
            break
        kept.append(word)
    return kept
