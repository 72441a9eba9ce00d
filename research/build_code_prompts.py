"""Write prompts that ask for code: tasks of our own, worded as people and editors word them. CC0, no data set is read.

    python research/build_code_prompts.py --count 3000 --out code.jsonl

One JSON object a line: {"id", "source", "licence", "prompt"}. Beside prompts of conversation (build_prompts.py) they
train an adapter for a model that writes code.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

LANGUAGES = ("Python",) * 8 + (
    "JavaScript",
    "JavaScript",
    "TypeScript",
    "Java",
    "C++",
    "C",
    "Go",
    "Rust",
    "C#",
    "Bash",
    "SQL",
)
# name, parameters, sentence
TASKS = (
    ("running_total", "values: list[float]", "return the running totals of a list of numbers"),
    ("second_largest", "values: list[int]", "return the second largest distinct value, or None if there is none"),
    ("is_rotation", "a: str, b: str", "check whether one string is a rotation of another"),
    ("word_counts", "text: str", "count how often each word occurs in a text, ignoring case and punctuation"),
    ("merge_intervals", "intervals: list[tuple[int, int]]", "merge overlapping intervals and return them sorted"),
    ("flatten", "nested: list", "flatten a list of arbitrarily nested lists"),
    ("chunks", "items: list, size: int", "split a list into pieces of a given size"),
    ("longest_run", "bits: str", "return the length of the longest run of equal characters"),
    ("transpose", "rows: list[list[int]]", "transpose a matrix given as a list of rows"),
    ("spiral", "matrix: list[list[int]]", "return the elements of a matrix in spiral order"),
    ("parse_duration", "text: str", "parse a duration such as '1h 30m' into seconds"),
    ("format_bytes", "size: int", "format a number of bytes in a readable unit"),
    ("caesar", "text: str, shift: int", "encrypt a text with a Caesar cipher, leaving other characters unchanged"),
    ("roman", "number: int", "convert a number from 1 to 3999 to Roman numerals"),
    ("from_roman", "numeral: str", "convert Roman numerals to a number"),
    ("balanced", "text: str", "check whether brackets of three kinds are balanced"),
    ("binary_search", "values: list[int], wanted: int", "find a value in a sorted list by binary search"),
    ("insertion_point", "values: list[int], value: int", "return where a value must be inserted to keep a list sorted"),
    ("quick_sort", "values: list[int]", "sort a list with quicksort"),
    ("merge_sort", "values: list[int]", "sort a list with merge sort"),
    ("heap_top", "values: list[int], k: int", "return the k largest values with a heap"),
    ("topological", "graph: dict[str, list[str]]", "order the nodes of a graph topologically, or report a cycle"),
    ("shortest_path", "graph: dict, start: str, end: str", "find a shortest path by breadth-first search"),
    ("dijkstra", "graph: dict, start: str", "compute shortest distances from a node with Dijkstra's algorithm"),
    ("islands", "grid: list[list[int]]", "count connected groups of ones in a grid"),
    ("edit_distance", "a: str, b: str", "compute the edit distance of two strings"),
    ("longest_common", "a: str, b: str", "return the longest common subsequence of two strings"),
    ("knapsack", "weights: list[int], values: list[int], room: int", "solve the 0/1 knapsack problem"),
    ("coin_change", "coins: list[int], amount: int", "return the fewest coins that make an amount, or -1"),
    ("permutations", "items: list", "generate all permutations of a list without the standard library's help"),
    ("subsets", "items: list", "generate all subsets of a list"),
    ("n_queens", "n: int", "count the solutions of the n queens problem"),
    ("sudoku", "board: list[list[int]]", "check whether a partly filled sudoku board is valid"),
    ("primes", "limit: int", "list all primes below a limit with a sieve"),
    ("factorise", "n: int", "return the prime factors of a number in ascending order"),
    ("gcd", "a: int, b: int", "compute the greatest common divisor of two numbers"),
    ("power_mod", "base: int, exponent: int, modulus: int", "compute a power modulo a number by repeated squaring"),
    ("perfect", "n: int", "check whether a number equals the sum of its proper divisors"),
    ("collatz", "n: int", "return the Collatz sequence that begins at a number"),
    ("digits_sum", "n: int", "add the digits of a number until one digit is left"),
    ("to_base", "n: int, base: int", "write a number in another base between 2 and 36"),
    ("median", "values: list[float]", "compute the median of a list"),
    ("moving_average", "values: list[float], window: int", "compute the moving average of a series"),
    ("standard_deviation", "values: list[float]", "compute the sample standard deviation"),
    ("histogram", "values: list[float], bins: int", "count values in bins of equal width"),
    ("normalise", "vector: list[float]", "scale a vector to unit length"),
    ("cosine", "a: list[float], b: list[float]", "compute the cosine similarity of two vectors"),
    ("matrix_product", "a: list[list[float]], b: list[list[float]]", "multiply two matrices and check their shapes"),
    ("polynomial", "coefficients: list[float], x: float", "evaluate a polynomial by Horner's rule"),
    ("newton_root", "f, derivative, start: float", "find a root of a function with Newton's method"),
    ("is_leap", "year: int", "check whether a year is a leap year"),
    ("weekday", "year: int, month: int, day: int", "return the weekday of a date without the datetime module"),
    ("days_between", "first: str, second: str", "count the days between two ISO dates"),
    ("next_birthday", "born: str, today: str", "return the number of days until the next birthday"),
    ("valid_email", "text: str", "check whether a text looks like an e-mail address"),
    ("valid_ipv4", "text: str", "check whether a text is an IPv4 address"),
    ("luhn", "number: str", "check a card number with the Luhn algorithm"),
    ("slug", "title: str", "turn a title into a URL slug"),
    ("camel_to_snake", "name: str", "convert a name from camel case to snake case"),
    ("snake_to_camel", "name: str", "convert a name from snake case to camel case"),
    ("wrap_text", "text: str, width: int", "wrap a text at a width without breaking words"),
    ("anagrams", "words: list[str]", "group words that are anagrams of each other"),
    ("palindrome", "text: str", "check whether a text reads the same backwards, ignoring case and spaces"),
    ("compress", "text: str", "compress a string by run-length encoding"),
    ("decompress", "text: str", "expand a run-length encoded string"),
    ("vowels", "text: str", "count the vowels in a text"),
    ("capitalise", "text: str", "capitalise the first letter of each sentence"),
    ("common_prefix", "words: list[str]", "return the longest common prefix of a list of words"),
    ("find_duplicates", "values: list", "return the values that occur more than once, in order of first appearance"),
    ("two_sum", "values: list[int], target: int", "return the indices of two values that add up to a target"),
    ("three_sum", "values: list[int]", "return all distinct triples that add up to zero"),
    ("maximum_subarray", "values: list[int]", "return the largest sum of a contiguous part of a list"),
    ("rotate", "values: list, steps: int", "rotate a list to the right"),
    ("remove_duplicates", "values: list", "remove duplicates from a list and keep the order"),
    ("partition", "values: list[int], pivot: int", "move smaller values before a pivot, keeping the order"),
    ("intersection", "a: list, b: list", "return the elements that two lists share"),
    ("pascal", "rows: int", "build Pascal's triangle"),
    ("fibonacci", "n: int", "return the n-th Fibonacci number with memoisation"),
    ("hanoi", "disks: int", "list the moves that solve the Towers of Hanoi"),
    ("game_of_life", "board: list[list[int]]", "compute the next generation of Conway's Game of Life"),
    ("tic_tac_toe", "board: list[str]", "report the winner of a tic-tac-toe board"),
    ("bank_account", "", "a bank account with deposits, withdrawals and an overdraft limit"),
    ("stack", "", "a stack that also returns its minimum in constant time"),
    ("queue_of_stacks", "", "a queue made of two stacks"),
    ("linked_list", "", "a singly linked list with insertion, deletion and reversal"),
    ("binary_tree", "", "a binary search tree with insertion, search and in-order traversal"),
    ("trie", "", "a trie with insertion and prefix search"),
    ("lru_cache", "", "a cache that drops the least recently used entry"),
    ("priority_queue", "", "a priority queue whose priorities can be changed"),
    ("matrix_class", "", "a matrix with addition, multiplication and a readable representation"),
    ("rate_limiter", "", "a rate limiter with a token bucket"),
    ("event_emitter", "", "an event emitter with subscription and unsubscription"),
    ("inventory", "", "an inventory of products with stock levels and prices"),
    ("shopping_cart", "", "a shopping cart with discounts and tax"),
    ("text_adventure", "", "rooms, doors and a player of a text adventure"),
    ("state_machine", "", "a state machine for a traffic light"),
    ("logger", "", "a logger with levels that writes to a file and rotates it"),
    ("read_csv", "path: str", "read a CSV file into a list of dictionaries and convert numbers"),
    ("write_json", "path: str, data: dict", "write data as indented JSON without leaving a half-written file"),
    ("count_lines", "folder: str", "count the lines of all source files below a folder"),
    ("find_large_files", "folder: str, size: int", "list files above a size, largest first"),
    ("rename_files", "folder: str, prefix: str", "add a prefix to all files of a folder, with a dry run"),
    ("hash_file", "path: str", "compute the SHA-256 of a file in pieces"),
    ("download", "url: str, path: str", "download a file with a progress bar and retries"),
    ("fetch_json", "url: str", "fetch JSON from an address with a timeout and clear errors"),
    ("todo_api", "", "a small REST API for a to-do list"),
    ("login_form", "", "a login form that validates its fields"),
    ("parse_log", "line: str", "parse a line of a web server's log into its fields"),
    ("top_visitors", "lines: list[str], n: int", "return the most frequent addresses in a log"),
    ("parse_query", "url: str", "parse the query string of a URL into a dictionary"),
    ("environment", "name: str, default: str", "read a setting from the environment and convert its type"),
    ("retry", "", "a decorator that repeats a function when it fails, waiting longer each time"),
    ("timed", "", "a decorator that reports how long a function took"),
    ("memoise", "", "a decorator that remembers results"),
    ("thread_pool", "jobs: list", "run jobs in a thread pool and collect results in order"),
    ("producer_consumer", "", "a producer and a consumer that share a bounded queue"),
    ("async_fetch", "urls: list[str]", "fetch several addresses concurrently with a limit"),
    ("tokenise", "expression: str", "split an arithmetic expression into tokens"),
    ("evaluate", "expression: str", "evaluate an arithmetic expression with precedence and parentheses"),
    ("to_postfix", "expression: str", "convert an infix expression to postfix notation"),
    ("json_path", "data: dict, path: str", "look up a value in nested data by a dotted path"),
    ("deep_merge", "a: dict, b: dict", "merge two nested dictionaries"),
    ("diff_dicts", "old: dict, new: dict", "report added, removed and changed keys of two dictionaries"),
    ("invert", "mapping: dict", "invert a dictionary whose values may repeat"),
    ("sort_by", "rows: list[dict], keys: list[str]", "sort dictionaries by several keys"),
    ("group_by", "rows: list[dict], key: str", "group dictionaries by a key"),
    ("pivot", "rows: list[dict], index: str, column: str, value: str", "build a pivot table"),
    ("linear_fit", "xs: list[float], ys: list[float]", "fit a line by least squares"),
    ("k_means", "points: list, k: int", "cluster points with k-means"),
    ("nearest", "points: list, query: tuple", "find the nearest point by Euclidean distance"),
    ("train_test_split", "rows: list, share: float, seed: int", "split rows randomly but reproducibly"),
    ("confusion", "expected: list, predicted: list", "compute a confusion matrix and the accuracy"),
    ("gradient_descent", "f, gradient, start: float", "minimise a function by gradient descent"),
    ("neural_layer", "", "a dense layer with forward and backward pass in NumPy"),
    ("convert_temperature", "value: float, unit: str", "convert between Celsius, Fahrenheit and Kelvin"),
    ("distance", "a: tuple, b: tuple", "compute the distance of two places by latitude and longitude"),
    ("mortgage", "principal: float, rate: float, years: int", "compute the monthly payment of a loan"),
    ("compound", "principal: float, rate: float, years: int", "compute compound interest year by year"),
    ("dice", "text: str", "roll dice given as '3d6+2'"),
    ("password", "length: int", "generate a random password with letters, digits and symbols"),
    ("guess", "", "a number guessing game for the command line"),
    ("hangman", "", "the game of hangman for the command line"),
    ("bar_chart", "data: dict[str, int]", "print a horizontal bar chart in the terminal"),
    ("draw_tree", "height: int", "print a tree of asterisks of a given height"),
)  # fmt: skip
ASK = (
    "Write a {language} function `{name}` to {what}.",
    "write a {language} function that can {what}",
    "In {language}, how do I {what}?",
    "Implement {name} in {language}: {what}. Include type annotations and a short example.",
    "Please {what} in {language}. Explain your solution briefly.",
    "I need {language} code to {what}. Handle edge cases.",
    "Write a {language} program that can {what}, and test it with a few cases.",
    "Give me the shortest readable {language} code to {what}.",
    "What is an efficient way to {what} in {language}? Show code and its complexity.",
    "Write unit tests for a {language} function `{name}` which should {what}.",
    "Create a command line tool in {language} to {what}.",
)
ASK_CLASS = (
    "Write a {language} class for {what}.",
    "Implement {what} in {language}, with comments.",
    "Design {what} in {language} and show how it is used.",
    "How would you write {what} in {language}?",
    "Write {what} in {language} and add unit tests.",
)
STUB = (
    "Complete the following function.\n\n```python\n{stub}```",
    "{stub}",
    "Complete this Python function and return only the code:\n\n{stub}",
    "Finish the body of this function:\n```python\n{stub}```\nThen explain how it works.",
    "Read the docstring and implement the function:\n\n{stub}",
)


def stub(name: str, parameters: str, what: str, rng: random.Random) -> str:
    """A Python function with a docstring and no body."""
    types = rng.random() < 0.6
    shown = (
        parameters if types else ", ".join(each.split(":")[0] for each in parameters.split(", ") if each[:1].islower())
    )
    quotes = rng.choice(('"""', "'''"))
    return f"def {name}({shown}):\n    {quotes}{what[:1].upper()}{what[1:]}.{quotes}\n"


def prompt(rng: random.Random) -> str:
    """One prompt."""
    name, parameters, what = rng.choice(TASKS)
    if not parameters:
        return rng.choice(ASK_CLASS).format(language=rng.choice(LANGUAGES), what=what)
    if rng.random() < 0.3:
        return rng.choice(STUB).format(stub=stub(name, parameters, what, rng))
    return rng.choice(ASK).format(language=rng.choice(LANGUAGES), name=name, what=what)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rng, texts = random.Random(args.seed), dict[str, None]()
    for _ in range(50 * args.count):
        if len(texts) < args.count:
            texts[prompt(rng)] = None
    with args.out.open("w", encoding="utf-8") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"id": number, "source": "code tasks", "licence": "CC0-1.0", "prompt": text}) + "\n")
    print(f"{len(texts)} prompts -> {args.out}")


if __name__ == "__main__":
    main()
