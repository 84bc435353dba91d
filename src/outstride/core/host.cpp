// Host work between passes that is done many times a second on small arrays, where numpy calls take
// longer than the work itself.
//
// This is a Python module. Each function has a Python version, which is the fall-back of installations
// without a compiler and the reference of the tests.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <vector>

#include "noise.h"

namespace {

// A buffer of a Python array, held for the time of a call.
class Lent {
 public:
  Lent() = default;
  Lent(const Lent&) = delete;
  Lent& operator=(const Lent&) = delete;
  ~Lent() {
    if (held_) PyBuffer_Release(&view_);
  }
  bool take(PyObject* array, bool writable = false) {
    held_ = PyObject_GetBuffer(array, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0;
    return held_;
  }
  // As above; fails unless the element type is one of `kinds` (characters of Python's struct).
  bool take(PyObject* array, const char* kinds) {
    held_ = PyObject_GetBuffer(array, &view_, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) == 0;
    if (held_ && (!view_.format || !strchr(kinds, view_.format[0]))) {
      PyErr_SetString(PyExc_TypeError, "an array has another element type than is needed");
      return false;
    }
    return held_;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(view_.buf);
  }
  template <typename T>
  Py_ssize_t count() const {
    return view_.len / (Py_ssize_t)sizeof(T);
  }

 private:
  Py_buffer view_ = {};
  bool held_ = false;
};

PyObject* refuse(const char* why) {
  PyErr_SetString(PyExc_ValueError, why);
  return nullptr;
}

PyObject* address(PyObject*, PyObject* array) {
  Lent lent;
  return lent.take(array) ? PyLong_FromVoidPtr(lent.as<void>()) : nullptr;
}

// --- which keys a node attends to: see ops/cpu/attention_metadata.py -------------------------------------------------------

struct Node {
  int32_t row, start, count, direct, pages, tail;
};

// The nodes that one node sees, in rising order.
using Seen = std::vector<int32_t>;

struct Span {
  const int64_t* parents;
  const int64_t* blocks;
  const int64_t* positions;
  const int64_t* slots;
  int count, first, kept;

  // Whether it is a chain that continues the cached tokens.
  bool is_straight() const {
    for (int i = 0; i < count; i++)
      if (parents[i] != i - 1 || positions[i] != kept + i || (i && blocks[i] <= blocks[i - 1]))
        return false;
    return true;
  }
};

constexpr long NO_SPACE = -1, UNUSUAL = -2;

// Lists the keys that a node sees beyond those that lie in their pages in order. Returns the end of the
// list.
long list_keys(const Span& s, const Seen& seen, Node& node, int32_t* tails, long at, long capacity) {
  int lead = 0;
  while (lead < (int)seen.size() && seen[lead] == lead && s.positions[lead] == s.kept + lead) lead++;
  const int64_t direct = s.kept + lead;
  int64_t size = 0, listed = 0;  // positions from `direct` on, gaps included; keys
  for (int32_t n : seen)
    if (s.positions[n] >= direct) size = std::max(size, s.positions[n] + 1 - direct), listed++;
  if (size + listed > capacity - at) return NO_SPACE;
  int32_t* mine = tails + at;
  std::fill(mine, mine + size, -1);
  int64_t end = size;  // a second key at a position comes last
  for (int32_t n : seen) {
    if (s.positions[n] < direct) continue;
    int32_t* place = mine + (s.positions[n] - direct);
    *(*place < 0 ? place : mine + end++) = (int32_t)s.slots[n];
  }
  node.direct = (int32_t)direct;
  node.tail = (int32_t)at;
  node.count = (int32_t)(direct + end);
  return at + (long)end;
}

long lay(const Span& s, Node* nodes, int32_t* tails, long at, long capacity) {
  if (s.is_straight()) {
    for (int i = s.first; i < s.count; i++) {
      Node& node = nodes[i - s.first];
      node.count = node.direct = s.kept + i + 1;
      node.tail = 0;
    }
    return at;
  }
  std::vector<Seen> members(s.count), seen(s.count);  // by block; by node
  for (int i = 0; i < s.count; i++) {
    if (s.blocks[i] < 0 || s.blocks[i] >= s.count || s.parents[i] >= i) return UNUSUAL;
    members[s.blocks[i]].push_back(i);
  }
  std::vector<int> known(s.count, -1);  // by block: a node whose keys are listed
  for (int i = 0; i < s.count; i++) {
    const Seen& own = members[s.blocks[i]];
    if (s.parents[i] < 0) {
      seen[i] = own;
    } else {
      const Seen& above = seen[s.parents[i]];
      seen[i].reserve(own.size() + above.size());
      std::set_union(own.begin(), own.end(), above.begin(), above.end(), std::back_inserter(seen[i]));
    }
    if (i < s.first) continue;
    Node& node = nodes[i - s.first];
    const int twin = known[s.blocks[i]];
    if (twin >= 0 && s.parents[twin] == s.parents[i]) {  // nodes of a block see the same keys
      const Node& same = nodes[twin - s.first];
      node.direct = same.direct, node.tail = same.tail, node.count = same.count;
      continue;
    }
    known[s.blocks[i]] = i;
    at = list_keys(s, seen[i], node, tails, at, capacity);
    if (at < 0) return at;
  }
  return at;
}

// keys(parents, blocks, positions, slots, first, kept, row, page, tables, windows, places, targets,
//      tails, at): fills in a span's rows from `row` on, in the node table of each window, and stores
// their positions and slots. Returns the end of what is listed in `tails` from `at` on; -1 if `tails` is
// too small, -2 if blocks or parents are not numbered as usual.
PyObject* keys(PyObject*, PyObject* const* a, Py_ssize_t given) {
  if (given != 14) return refuse("keys takes 14 arguments");
  Lent parents, blocks, positions, slots, places, targets, tails;
  if (!parents.take(a[0]) || !blocks.take(a[1]) || !positions.take(a[2]) || !slots.take(a[3]) ||
      !places.take(a[10], true) || !targets.take(a[11], true) || !tails.take(a[12], true))
    return nullptr;
  long numbers[5];
  const int from[5] = {4, 5, 6, 7, 13};
  for (int i = 0; i < 5; i++) {
    numbers[i] = PyLong_AsLong(a[from[i]]);
    if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
  }
  const long first = numbers[0], row = numbers[2], page = numbers[3], at = numbers[4];
  const Py_ssize_t count = parents.count<int64_t>(), rows = count - first;
  const Span span = {parents.as<const int64_t>(),   blocks.as<const int64_t>(),
                     positions.as<const int64_t>(), slots.as<const int64_t>(),
                     (int)count,                    (int)first,
                     (int)numbers[1]};
  if (blocks.count<int64_t>() != count || positions.count<int64_t>() != count ||
      slots.count<int64_t>() != count || first < 0 || rows < 0 || row < 0 || at < 0 ||
      row + rows > places.count<int64_t>() || row + rows > targets.count<int64_t>() ||
      !PyTuple_Check(a[8]) || !PyTuple_Check(a[9]) || PyTuple_GET_SIZE(a[8]) != PyTuple_GET_SIZE(a[9]))
    return refuse("the arrays of a span have different sizes");
  const int32_t* first_table = nullptr;
  long end = at;
  for (Py_ssize_t t = 0; t < PyTuple_GET_SIZE(a[8]); t++) {
    Lent table;
    if (!table.take(PyTuple_GET_ITEM(a[8], t), true)) return nullptr;
    if (row + rows > table.count<Node>()) return refuse("a node table is too small");
    const long window = PyLong_AsLong(PyTuple_GET_ITEM(a[9], t));
    if (window == -1 && PyErr_Occurred()) return nullptr;
    Node* nodes = table.as<Node>() + row;
    if (first_table == nullptr) {
      end = lay(span, nodes, tails.as<int32_t>(), at, (long)tails.count<int32_t>());
      if (end < 0) return PyLong_FromLong(end);
      first_table = table.as<int32_t>();
    } else {
      const Node* laid = reinterpret_cast<const Node*>(first_table) + row;
      std::copy(laid, laid + rows, nodes);
    }
    for (Py_ssize_t i = 0; i < rows; i++) {
      nodes[i].row = (int32_t)(row + i);
      nodes[i].pages = (int32_t)page;
      const int64_t seen_from = span.positions[first + i] - window + 1;
      nodes[i].start = window == 0 ? 0 : window < 0 ? 1 : (int32_t)std::max<int64_t>(seen_from, 0);
    }
  }
  std::copy(span.positions + first, span.positions + count, places.as<int64_t>() + row);
  std::copy(span.slots + first, span.slots + count, targets.as<int64_t>() + row);
  return PyLong_FromLong(end);
}

// --- the top-k of all threads: see ops/cpu/gemm.py -------------------------------------

struct Best {
  float value;
  int32_t token;
};

// merge(best, threads, rows, k, tokens, values): the k highest values that all threads found for each row;
// clears `best` for the next call. Of equal values the lowest token comes first.
PyObject* merge(PyObject*, PyObject* args) {
  PyObject *table, *places, *numbers;
  int threads, rows, k;
  if (!PyArg_ParseTuple(args, "OiiiOO", &table, &threads, &rows, &k, &places, &numbers)) return nullptr;
  Lent lent, tokens, values;
  if (!lent.take(table, true) || !tokens.take(places, true) || !values.take(numbers, true)) return nullptr;
  const Py_ssize_t all = (Py_ssize_t)rows * k;
  if (threads < 1 || rows < 0 || k < 1 || lent.count<Best>() < threads * all ||
      tokens.count<int64_t>() != all || values.count<float>() != all)
    return refuse("the tables of results have different sizes");
  Best* best = lent.as<Best>();
  std::vector<int> next(threads);
  for (int row = 0; row < rows; row++) {
    std::fill(next.begin(), next.end(), 0);
    for (int i = 0; i < k; i++) {
      const Best* winner = nullptr;
      int owner = 0;
      for (int t = 0; t < threads; t++) {
        const Best* its = best + (t * (Py_ssize_t)rows + row) * k + next[t];
        const bool better = next[t] < k && (!winner || its->value > winner->value ||
                                            (its->value == winner->value && its->token < winner->token));
        if (better) winner = its, owner = t;
      }
      next[owner]++;
      tokens.as<int64_t>()[row * (Py_ssize_t)k + i] = winner->token;
      values.as<float>()[row * (Py_ssize_t)k + i] = winner->value;
    }
  }
  const Best none = {-std::numeric_limits<float>::infinity(), 0};
  std::fill(best, best + threads * all, none);
  Py_RETURN_NONE;
}

// --- the most likely paths: see draft/tree_search.py --------------------------------------------------------

float dot(const float* a, const float* b, int size) {
  float sums[8] = {}, total = 0.0f;
  int i = 0;
  for (; i + 8 <= size; i += 8)
    for (int j = 0; j < 8; j++) sums[j] += a[i + j] * b[i + j];
  for (; i < size; i++) total += a[i] * b[i];
  for (int j = 0; j < 8; j++) total += sums[j];
  return total;
}

void softmax(float* scores, int count) {
  float top = scores[0], total = 0.0f;
  for (int i = 1; i < count; i++) top = std::max(top, scores[i]);
  for (int i = 0; i < count; i++) total += scores[i] = expf(scores[i] - top);
  for (int i = 0; i < count; i++) scores[i] /= total;
}

struct Tables {
  const int64_t* tokens;  // [levels][candidates]
  const float* values;    // [levels][candidates]: logits
  const float* noise;     // [levels][candidates]; null at temperature 0
  const int64_t* rows;    // by token: its row in both bigram tables
  const float* before;    // [..][rank]
  const float* after;     // [..][rank]
  int levels, candidates, width, rank;
  float temperature;
};

struct Step {
  float reached, rate;
  int64_t token;
  int parent, depth;
};

// The `width` most likely paths after a token, level by level.
std::vector<Step> most_likely(const Tables& a, int64_t last) {
  const int size = a.candidates;
  std::vector<float> rates((size_t)a.width * size), reached((size_t)a.width * size);
  std::vector<int> order;
  std::vector<Step> found;
  int above = -1, paths = 1;  // start of the previous level in `found`; number of paths
  for (int level = 0; level < a.levels; level++) {
    const int64_t* tokens = a.tokens + (size_t)level * size;
    for (int p = 0; p < paths; p++) {
      float* row = &rates[(size_t)p * size];
      const float* before = a.before + a.rows[level ? found[above + p].token : last] * a.rank;
      for (int c = 0; c < size; c++) {
        row[c] = dot(before, a.after + a.rows[tokens[c]] * a.rank, a.rank);
        row[c] += a.values[(size_t)level * size + c];
        // SHARED_NOISE_SHARPNESS of core/sampling.py
        if (a.noise) row[c] = 2.0f * (row[c] / a.temperature + a.noise[(size_t)level * size + c]);
      }
      softmax(row, size);
      const float so_far = level ? found[above + p].reached : 1.0f;
      for (int c = 0; c < size; c++) reached[(size_t)p * size + c] = so_far * row[c];
    }
    const int all = paths * size, keep = std::min(a.width, all);
    order.resize(all);
    for (int i = 0; i < all; i++) order[i] = i;
    std::partial_sort(order.begin(), order.begin() + keep, order.end(), [&](int one, int other) {
      return reached[one] > reached[other] || (reached[one] == reached[other] && one < other);
    });
    const int here = (int)found.size();
    for (int i = 0; i < keep; i++) {
      const int from = order[i];
      found.push_back({reached[from], rates[from], tokens[from % size],
                       level ? above + from / size : -1, level});
    }
    above = here;
    paths = keep;
  }
  return found;
}

bool has_rows(const Tables& a, int64_t last, Py_ssize_t vocabulary, Py_ssize_t before, Py_ssize_t after) {
  for (int i = -1; i < a.levels * a.candidates; i++) {
    const int64_t token = i < 0 ? last : a.tokens[i];
    if (token < 0 || token >= vocabulary) return false;
    const int64_t row = a.rows[token];
    if (row < 0 || row >= before || (i >= 0 && row >= after)) return false;
  }
  return true;
}

// The `budget` most likely nodes of all levels, in their old order; of equal ones, the first.
std::vector<Step> leading(const std::vector<Step>& all, int budget) {
  std::vector<int> order(all.size()), places(all.size(), -1);
  for (size_t i = 0; i < all.size(); i++) order[i] = (int)i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int one, int other) { return all[one].reached > all[other].reached; });
  order.resize(std::min(order.size(), (size_t)budget));
  std::sort(order.begin(), order.end());
  std::vector<Step> kept;
  for (int node : order) {
    const int parent = all[node].parent;
    if (parent >= 0 && places[parent] < 0) continue;  // its parent was left out
    places[node] = (int)kept.size();
    kept.push_back(all[node]);
    kept.back().parent = parent < 0 ? -1 : places[parent];
  }
  return kept;
}

// paths(tokens, values, noise or None, rows, before, after, last, levels, width, rank, temperature,
// budget): lists of the tokens of the most likely nodes, of their parents, depths and rates.
PyObject* paths(PyObject*, PyObject* args) {
  PyObject* arrays[6];
  long long last;
  int levels, width, rank, budget;
  float temperature;
  if (!PyArg_ParseTuple(args, "OOOOOOLiiifi", &arrays[0], &arrays[1], &arrays[2], &arrays[3], &arrays[4],
                        &arrays[5], &last, &levels, &width, &rank, &temperature, &budget))
    return nullptr;
  Lent lent[6];
  for (int i = 0; i < 6; i++)
    if (arrays[i] != Py_None && !lent[i].take(arrays[i], i == 0 || i == 3 ? "lq" : "f")) return nullptr;
  const Py_ssize_t all = lent[0].count<int64_t>();
  const bool sampled = arrays[2] != Py_None;
  if (levels < 1 || width < 1 || rank < 1 || budget < 0 || all < levels || all % levels || all > 1 << 20 ||
      lent[1].count<float>() != all || (sampled && lent[2].count<float>() != all))
    return refuse("candidates and logits have different sizes");
  const Tables tables = {lent[0].as<const int64_t>(), lent[1].as<const float>(),
                         sampled ? lent[2].as<const float>() : nullptr, lent[3].as<const int64_t>(),
                         lent[4].as<const float>(),   lent[5].as<const float>(),
                         levels, (int)(all / levels), width, rank, temperature};
  if (!has_rows(tables, last, lent[3].count<int64_t>(), lent[4].count<float>() / rank,
                lent[5].count<float>() / rank)) {
    PyErr_SetString(PyExc_IndexError, "a draft head proposed a token that its bigram tables do not have");
    return nullptr;
  }
  const std::vector<Step> found = leading(most_likely(tables, last), budget);
  PyObject* lists = PyTuple_New(4);
  for (int i = 0; lists && i < 4; i++) {
    PyObject* list = PyList_New((Py_ssize_t)found.size());
    if (!list) {
      Py_DECREF(lists);
      return nullptr;
    }
    PyTuple_SET_ITEM(lists, i, list);
    for (size_t n = 0; n < found.size(); n++) {
      const Step& step = found[n];
      PyObject* value = i == 0   ? PyLong_FromLongLong(step.token)
                        : i == 1 ? PyLong_FromLong(step.parent)
                        : i == 2 ? PyLong_FromLong(step.depth)
                                 : PyFloat_FromDouble(step.rate);
      if (!value) {
        Py_DECREF(lists);
        return nullptr;
      }
      PyList_SET_ITEM(list, (Py_ssize_t)n, value);
    }
  }
  return lists;
}

// --- noise: see core/sampling.py ------------------------------------------------------------------------

// noise(seed, index, purpose, positions, tokens, out): the noise of each token at its position, or of
// all tokens at one position.
PyObject* noise(PyObject*, PyObject* args) {
  unsigned long long seed;
  long long index;
  int purpose;
  PyObject* arrays[3];
  if (!PyArg_ParseTuple(args, "KLiOOO", &seed, &index, &purpose, &arrays[0], &arrays[1], &arrays[2]))
    return nullptr;
  Lent lent[2], out;
  if (!lent[0].take(arrays[0], "lq") || !lent[1].take(arrays[1], "lq") || !out.take(arrays[2], true))
    return nullptr;
  const Py_ssize_t count = lent[1].count<int64_t>(), places = lent[0].count<int64_t>();
  if ((places != count && places != 1) || out.count<float>() != count)
    return refuse("positions, tokens and output have different sizes");
  const int64_t *positions = lent[0].as<const int64_t>(), *tokens = lent[1].as<const int64_t>();
  uint32_t words[4];
  for (Py_ssize_t i = 0; i < count; i++) {
    const int64_t block = tokens[i] >> 2, position = positions[places == 1 ? 0 : i];
    const bool same = i && block == tokens[i - 1] >> 2 && (places == 1 || position == positions[i - 1]);
    if (!same)
      philox((uint32_t)block, (uint32_t)position, (uint32_t)index, (uint32_t)purpose, seed, words);
    out.as<float>()[i] = noise_of(words[tokens[i] & 3]);
  }
  Py_RETURN_NONE;
}

// sample(row, seed, index, purpose, position, temperature, bar, k): the tokens with the k largest sums
// of logit and noise, best first; of equal ones, the lowest. Tokens below `bar` are left out; forbidden
// ones come last.
PyObject* sample(PyObject*, PyObject* args) {
  PyObject* array;
  unsigned long long seed;
  long long index, position;
  int purpose, k;
  float temperature, bar;
  if (!PyArg_ParseTuple(args, "OKLiLffi", &array, &seed, &index, &purpose, &position, &temperature, &bar, &k))
    return nullptr;
  Lent row;
  if (!row.take(array, "f")) return nullptr;
  if (k < 1 || !(temperature > 0.0f)) return refuse("sampling needs k >= 1 and a temperature above 0");
  const Py_ssize_t count = row.count<float>();
  std::vector<Best> best;
  std::vector<int32_t> forbidden;
  uint32_t words[4];
  int64_t block = -1;
  for (Py_ssize_t i = 0; i < count; i++) {
    const float x = temperature == 1.0f ? row.as<const float>()[i] : row.as<const float>()[i] / temperature;
    if (bar > -INFINITY && !(x >= bar)) continue;
    if (!(x > -INFINITY)) {  // or NaN, from a broken model
      if ((int)forbidden.size() < k) forbidden.push_back((int32_t)i);
      continue;
    }
    const bool full = (int)best.size() == k;
    if (full && x + MAX_NOISE < best.back().value) continue;
    if (block != i >> 2) {
      block = i >> 2;
      philox((uint32_t)block, (uint32_t)position, (uint32_t)index, (uint32_t)purpose, seed, words);
    }
    const uint32_t word = words[i & 3];
    if (full && x + max_noise(word) < best.back().value) continue;
    const Best mine = {x + noise_of(word), (int32_t)i};
    if (full && !(mine.value > best.back().value)) continue;  // tokens come in rising order
    if (full) best.pop_back();
    const auto lower = [](const Best& one, const Best& other) { return one.value > other.value; };
    best.insert(std::upper_bound(best.begin(), best.end(), mine, lower), mine);
  }
  for (size_t i = 0; i < forbidden.size() && (int)best.size() < k; i++)
    best.push_back({-INFINITY, forbidden[i]});
  PyObject* found = PyList_New((Py_ssize_t)best.size());
  for (size_t i = 0; found && i < best.size(); i++)
    PyList_SET_ITEM(found, (Py_ssize_t)i, PyLong_FromLong(best[i].token));
  return found;
}

PyMethodDef METHODS[] = {
    {"address", address, METH_O, "The address of an array's data."},
    {"sample", sample, METH_VARARGS, "Samples tokens from a row of logits."},
    {"keys", (PyCFunction)(void (*)(void))keys, METH_FASTCALL, "Lists the keys of a span."},
    {"merge", merge, METH_VARARGS, "Merges the top-k of threads."},
    {"noise", noise, METH_VARARGS, "The noise of tokens at positions."},
    {"paths", paths, METH_VARARGS, "The most likely paths through candidates."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_host", nullptr, 0, METHODS, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__host() { return PyModule_Create(&MODULE); }
