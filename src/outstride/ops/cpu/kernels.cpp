// Passes on CPUs: integer products of 8-bit or 4-bit weights with 8-bit activations, attention over
// pages.
//
// No framework: plain buffers in, plain buffers out, errors as return codes. The code of the kernels
// is in kernels.inc, compiled here for each instruction set; `outstride_open` chooses one at run time.

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

#include "../../core/noise.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_neon.h>
#include <sys/auxv.h>
#endif

// Builds, numbered as in native.py. Which of them this compiler can make: an older one leaves some out.
#define ISA_PORTABLE 0
#define ISA_AVX2 1
#define ISA_AVX_VNNI 2
#define ISA_AVX512_VNNI 3
#define ISA_AMX 4
#define ISA_NEON_DOTPROD 5
#define ISA_NEON_I8MM 6
#define ISAS 7
#if defined(__clang__) || __GNUC__ >= 11
#define NEW_COMPILER 1
#endif
#if defined(OUTSTRIDE_AVX_VNNI_STAND_IN)  // a program for tests: tests/ops/replay
#define HAVE_AVX_VNNI 1
#define HAVE_AMX 1
#elif defined(__x86_64__)
#define HAVE_AVX2 1
#define HAVE_AVX_VNNI NEW_COMPILER
#define HAVE_AVX512_VNNI 1
#define HAVE_AMX NEW_COMPILER
#elif defined(__aarch64__) && defined(__linux__)
#define HAVE_NEON_DOTPROD NEW_COMPILER
#define HAVE_NEON_I8MM NEW_COMPILER
#endif

namespace {

// --- structs of the callers (mirrored in native.py) -------------------------------------------------

struct HadamardRotation {  // see kernels.hadamard.inc
  const float* signs;      // [depth]
  const int32_t* factors;  // of the number of runs, and 0
  const float* blends;     // for each factor a table of its size
  int32_t run;
};

struct Matrix {
  const uint8_t* data;   // [tiles][depth / 4][16 channels][4]; of 4 bits: see int4.py
  const float* scale;    // [tiles * 16]; null if each group has its own
  const int32_t* zero;   // [tiles * 16]: the code of 0; null likewise
  const float* bias;     // [tiles * 16] or null
  const HadamardRotation* rotation;      // null: rows are quantized without rotation
  int32_t tiles, depth;  // depth: K rounded up to 16, or to a whole group
  int32_t bits;          // 8 or 4
};

struct LoraFactors {  // what a LoRA adapter adds to a product, in float32
  const float* low;      // [rank][width of the rows]
  const float* high;     // [tiles][rank][16]
  const int32_t* parts;  // [tiles][2]: the first of the ranks that a tile has to do with, their number
  int32_t rank;
};

struct Node {
  int32_t row, start, count, direct, pages, tail;
  // Keys `start` to `count` by logical position: those below `direct` in the pages from `pages` on,
  // the others in the slots from `tail` on (-1: nothing there).
};

struct Pass {  // shared by all layers of a pass
  float* x;          // [rows][width]
  float* qkv;        // [rows][channels of the product]
  float* mixed;      // [rows][heads_width]
  float* middle;     // [rows][middle_width]
  const float* cos;  // [positions][head_dim / 2]
  const float* sin;
  const int64_t* positions;
  const int64_t* slots;
  const int32_t* pages;
  const int32_t* tails;
  const uint8_t* adapter_rows;  // [rows]: the number of each row's adapter, 0: none; null: all none
  float* low;            // [rows][ranks], or one such block per thread where rows are few
  const float* local_cos;  // [positions][head_dim / 2]: of layers with a window, where theirs differ
  const float* local_sin;
  const float* growth;   // [positions]: factors of queries; or null
  float* branch;         // [rows][width]: what is normalised before it is added to x
  int32_t ranks;
  int32_t rows, width, hidden, heads_width, middle_width, heads, kv_heads, head_dim, page_size;
  float eps, scale;
};

struct Experts {  // the mixture of experts of a layer: see kernels.experts.inc and ops/routing.py
  const float* router;       // [count][width]
  const float* router_bias;  // [count]: added to the router's logits; or null
  const float* bias;         // [count]: added to the scores by which experts are chosen; or null
  const float* shared_gate;  // [width]: what a sigmoid scales the shared expert by; or null
  const Matrix* gate_up;     // of all experts, one after the other
  const Matrix* down;
  int32_t count, per_token, sigmoid, biased, normalized, groups, groups_kept;
  float scale;
  float alpha, limit;  // of a clamped SwiGLU; limit 0: SiLU
};

struct Layer {
  const Pass* pass;
  const Node* const* nodes;  // where this layer's nodes are found: windows differ between layers
  const float* attention_norm;  // or null, as mlp_norm
  const float* query_norm;
  const float* key_norm;
  const float* mlp_norm;
  const Matrix* qkv;
  const Matrix* output;
  const Matrix* gate_up;
  const Matrix* down;
  uint8_t* keys;    // [slots / 16][kv_heads]: see kernels.cache.inc
  uint8_t* values;
  const LoraFactors* adapters;  // [adapters][4]: to qkv, output, gate_up and down; or null
  int32_t rotate;          // 0: no RoPE; 1: that of the pass; 2: its local one
  int32_t wide_norms;      // whether norms of queries and keys run over all heads of a row
  float clip;              // of queries, keys and values; 0: they are not clipped
  const float* attention_post_norm;  // of what attention adds to x; or null
  const float* mlp_post_norm;        // of what the MLP adds to x; or null
  const float* sinks;      // [heads]: a logit without a value; or null
  int32_t activation;      // 0: SiLU, 1: GELU with tanh
  float softcap;           // of attention logits; 0: none
  float scale;             // of attention logits; 0: that of the pass
  const Experts* experts;  // or null; gate_up and down are then the shared expert, of no tiles if there is none
};

struct Best {
  float value;
  int32_t token;
};

struct Head {
  const float* x;
  const float* norm;
  const Matrix* matrix;
  float* logits;  // [rows][tiles * 16] or null
  Best* best;     // [threads][rows][k], best first
  int32_t rows, width, hidden, vocabulary, k;
  float eps, softcap;  // softcap: of logits; 0: none
};

struct SamplingSpec {  // temperature, filters and the key of the noise: see core/sampling.py
  uint64_t seed;
  int64_t position;
  int32_t index, purpose, top_k;
  float temperature, min_p, log_min_p;
  double top_p;
};

struct Candidate {
  float value;
  int32_t id;
};

struct SampleTask {
  const float* logits;  // [rows][stride]
  const SamplingSpec* specs;    // [rows]
  float* scaled;        // [threads][stride]
  Candidate* scratch;      // [threads][stride]
  int32_t* out;         // [rows][k], -1 where there is nothing left to choose
  int32_t rows, stride, vocabulary, k;
};

constexpr int MAX_BEST = 64;

// --- threads --------------------------------------------------------------------------------------

constexpr int MAX_FACTOR = 64;  // of `HadamardRotation::factors`: hadamard.py leaves larger ones out

struct Codes {  // quantized rows: at most two bytes for each value, one scale for each row
  int8_t* bytes;
  float* scale;
  int32_t* sums;  // [rows][slices]: sums of the values
  float* groups;  // [rows][depth / 32][2]: for weights of 4 bits, see kernels.int4.inc
};

struct ExpertSpace {  // buffers of layers with experts; a pair is a row and one of its experts
  float *normed = nullptr, *logits = nullptr;  // [rows][width], [rows][stride]
  float* shared = nullptr;                     // [rows]: factors of the shared expert
  float *shares = nullptr, *pair_shares = nullptr;
  int32_t *chosen = nullptr, *places = nullptr;  // [rows][per_token]: experts, pairs
  int32_t *pair_rows = nullptr, *pair_experts = nullptr;
  int32_t *starts = nullptr, *next = nullptr, *active = nullptr;  // by expert; those that have rows
  int32_t* kept = nullptr;                                        // [threads][groups]
  float* middle = nullptr;                                        // [pairs][inner]
  Codes codes{};                                                  // of pairs
  int32_t stride = 0, active_count = 0;
};

// Products over at most this many columns are summed as 32-bit integers without overflow; longer ones
// are floating-point sums of such slices.
constexpr int SLICE = 4096;

constexpr int slices(int depth) { return (depth + SLICE - 1) / SLICE; }

struct Pool;

struct Share {  // one thread's part of an operation
  int index, count;
  Codes* codes;   // its own
  Codes* shared;  // of all threads
  float* scratch;
  float* rotated;  // a row before it is quantized
  Pool* pool;
};

constexpr int MAX_THREADS = 64;
constexpr int STAGES = 2;  // how many times an operation distributes work

// How much of a thread's work is taken: from the front << 32 | from the back.
struct alignas(64) Taken {
  std::atomic<uint64_t> ends{0};
};

// An operation runs on the threads that are ready. Waiting threads join it at once. A descheduled thread
// is not waited for, because a loaded machine would stall at every operation. The number of threads
// changes which thread computes what, and no result.
struct Pool {
  int count = 1;
  bool wide = false;  // whether kernels use registers that are wider than those of the rest
  std::atomic<uint64_t> state{0};  // number of the operation << 32 | closed | how many joined
  std::atomic<int> arrived{0};     // at the barrier
  std::atomic<int> passed{0};      // rises with each barrier
  std::atomic<int> finished{0};
  std::atomic<int> sleeping{0};
  void (*work)(const void*, Share*) = nullptr;
  const void* argument = nullptr;
  pthread_t threads[MAX_THREADS];
  Share shares[MAX_THREADS];
  Codes codes[MAX_THREADS];
  Codes shared{};
  ExpertSpace experts{};
  Taken taken[STAGES][MAX_THREADS];
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
};

constexpr uint64_t CLOSED = 1ull << 31, JOINED = CLOSED - 1;
constexpr uint32_t THE_END = 0xffffffffu;
constexpr int JOIN_SPINS = 64;  // how long an operation stays open for joining, in pause instructions
constexpr int IDLE_SPINS = 80000;  // how long a thread spins for the next one: longer than drafting takes

inline void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("isb" ::: "memory");  // takes about as long; `yield` takes no time at all
#else
  __asm__ __volatile__("" ::: "memory");
#endif
}

// Spins for a moment, then yields: on a loaded machine a spinning thread takes time from others.
template <typename F>
inline void until(F ready) {
  for (int i = 0; !ready(); i++) {
    if (i < 4000) {
      pause_cpu();
    } else {
      sched_yield();
    }
  }
}

void wait_all(Share* s) {
  Pool* p = s->pool;
  if (s->count == 1) return;
  const int round = p->passed.load(std::memory_order_acquire);
  if (p->arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == s->count) {
    p->arrived.store(0, std::memory_order_relaxed);
    p->passed.store(round + 1, std::memory_order_release);
  } else {
    until([&] { return p->passed.load(std::memory_order_acquire) != round; });
  }
}

// Takes at most `max_units` of a thread's `whole` units: its owner from the front, others from the
// back. Returns how many, starting at `at`.
inline int take(Taken* taken, int whole, int max_units, bool own, int* at) {
  uint64_t ends = taken->ends.load(std::memory_order_relaxed);
  for (;;) {
    const int front = (int)(ends >> 32), back = (int)(uint32_t)ends, left = whole - front - back;
    if (left <= 0) return 0;
    const int count = left < max_units ? left : max_units;
    const uint64_t after = own ? ends + ((uint64_t)count << 32) : ends + (uint64_t)count;
    if (!taken->ends.compare_exchange_weak(ends, after, std::memory_order_relaxed)) continue;
    *at = own ? front : whole - back - count;
    return count;
  }
}

// Distributes `units` over threads in multiples of `step`, about `max_units` at a time. Each thread has
// its own range and steals from others when it is done with it. `work(first, last)`.
template <typename F>
inline void share_out(Share* s, int stage, int units, int step, int max_units, F work) {
  const auto from = [&](int who) {
    return who == s->count ? units : step * (int)((int64_t)(units / step) * who / s->count);
  };
  for (int i = 0; i < s->count; i++) {
    const int who = (s->index + i) % s->count, first = from(who), whole = from(who + 1) - first;
    for (int at, count; (count = take(&s->pool->taken[stage][who], whole, max_units, i == 0, &at));)
      work(first + at, first + at + count);
  }
}

// A worker's place in the operation that is open now, or 0 if it came too late.
int join(Pool* p, uint32_t number) {
  uint64_t state = p->state.load(std::memory_order_acquire);
  while ((uint32_t)(state >> 32) == number && !(state & CLOSED))
    if (p->state.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel))
      return (int)(state & JOINED) + 1;
  return 0;
}

void* serve(void* argument) {
  Share* s = (Share*)argument;
  Pool* p = s->pool;
  uint32_t seen = 0, number;
  for (;;) {
    int spins = 0;
    while ((number = (uint32_t)(p->state.load(std::memory_order_acquire) >> 32)) == seen) {
      if (++spins < IDLE_SPINS) {
        pause_cpu();
        continue;
      }
      pthread_mutex_lock(&p->mutex);  // nothing to do for a while: sleep
      p->sleeping.fetch_add(1);
      while ((uint32_t)(p->state.load() >> 32) == seen) pthread_cond_wait(&p->wake, &p->mutex);
      p->sleeping.fetch_sub(1);
      pthread_mutex_unlock(&p->mutex);
    }
    if (number == THE_END) return nullptr;
    seen = number;
    const int index = join(p, number);
    if (!index) continue;
    until([&] { return p->state.load(std::memory_order_acquire) & CLOSED; });
    s->index = index;
    s->count = (int)(p->state.load(std::memory_order_acquire) & JOINED) + 1;
    p->work(p->argument, s);
    p->finished.fetch_add(1, std::memory_order_release);
  }
}

void announce(Pool* p, uint32_t number) {
  p->state.store((uint64_t)number << 32);
  if (p->sleeping.load()) {
    pthread_mutex_lock(&p->mutex);
    pthread_cond_broadcast(&p->wake);
    pthread_mutex_unlock(&p->mutex);
  }
}

// Clears the upper halves of wide registers. While they hold data, legacy SSE instructions have false
// dependencies: everything a process does between passes took several times as long.
inline void leave([[maybe_unused]] const Pool* p) {
#if defined(__x86_64__)
  if (p->wide) __asm__ __volatile__("vzeroupper" ::: "memory");
#endif
}

void run(Pool* p, void (*work)(const void*, Share*), const void* argument) {
  int joined = 0;
  for (auto& stage : p->taken)
    for (int i = 0; i < p->count; i++) stage[i].ends.store(0, std::memory_order_relaxed);
  if (p->count > 1) {
    p->work = work;
    p->argument = argument;
    p->finished.store(0, std::memory_order_relaxed);
    const uint32_t last = (uint32_t)(p->state.load(std::memory_order_relaxed) >> 32);
    announce(p, last % 0x7fffffffu + 1);
    for (int i = 0; i < JOIN_SPINS; i++) {
      if ((int)(p->state.load(std::memory_order_acquire) & JOINED) == p->count - 1) break;
      pause_cpu();
    }
    joined = (int)(p->state.fetch_or(CLOSED, std::memory_order_acq_rel) & JOINED);
  }
  Share* s = &p->shares[0];
  s->index = 0;
  s->count = joined + 1;
  work(argument, s);
  leave(p);
  until([&] { return p->finished.load(std::memory_order_acquire) == joined; });
}

// --- numbers of sixteen bits ------------------------------------------------------------------------

[[maybe_unused]] float from_half(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mantissa = h & 0x3ff;
  int exponent = (h >> 10) & 31;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | mantissa << 13;
  } else if (exponent) {
    bits = sign | (uint32_t)(exponent + 112) << 23 | mantissa << 13;
  } else {
    const float tiny = (float)mantissa * 5.9604644775390625e-8f;  // 2**-24
    memcpy(&bits, &tiny, 4);
    bits |= sign;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// --- sampling tokens -----------------------------------------------------------------------------------

inline int64_t needed_mass(double top_p, int64_t total) { return (int64_t)ceil(top_p * (double)total); }

inline void sort_candidates(Candidate* c, int count) {  // by falling value, then by rising id
  std::sort(c, c + count, [](const Candidate& a, const Candidate& b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
  });
}

inline void sort_by_id(Candidate* c, int count) {
  std::sort(c, c + count, [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

// --- the cache and attention ------------------------------------------------------------------------

constexpr int MAX_HEAD_DIM = 1024;  // of a head

// A head's dimensions in the cache: in whole lines of sixteen.
constexpr int wide_of(int head_dim) { return (head_dim + 15) / 16 * 16; }

// Bytes of one head of sixteen cached positions, keys or values.
constexpr size_t record_of(int head_dim) { return (size_t)wide_of(head_dim) * 16 + 64; }

constexpr int MAX_SET = 24;       // queries that are worked on at a time: see `SET` of a build
constexpr int MAX_QUERIES = 48;  // of one key head that go together, if not a single node has more
constexpr int CHUNK = 512;        // positions whose scores are made before their weights
constexpr int STRIDE = CHUNK + 32;  // from one query's scores to the next: other lines of the cache

// Whole sets of any build.
constexpr int max_queries(int group) {
  static_assert(MAX_QUERIES % MAX_SET == 0 && MAX_QUERIES % 16 == 0);
  return ((group > MAX_QUERIES ? group : MAX_QUERIES) + MAX_QUERIES - 1) / MAX_QUERIES * MAX_QUERIES;
}

// What a thread needs for it, in units of four bytes; see `unit_of`.
constexpr int attention_scratch(int group, int head_dim) {
  const int rows = max_queries(group), wide = wide_of(head_dim);
  return rows * wide * 3 / 2 + rows * 4 + MAX_SET * (STRIDE * 3 + 2 * wide + 2) +
         (int)record_of(head_dim) / 2;
}

}  // namespace

// --- one namespace for each instruction set ---------------------------------------------------------

#define ISA ISA_PORTABLE
namespace portable {
namespace {
#include "kernels.inc"
}
}  // namespace portable
#undef ISA

#if HAVE_AVX2
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA ISA_AVX2
namespace avx2 {
namespace {
#include "kernels.inc"
}
}  // namespace avx2
#undef ISA
#pragma GCC pop_options
#endif

#if HAVE_AVX_VNNI
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define ISA ISA_AVX_VNNI
namespace avx_vnni {
namespace {
#include "kernels.inc"
}
}  // namespace avx_vnni
#undef ISA
#pragma GCC pop_options
#endif

#if HAVE_AVX512_VNNI
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,prefer-vector-width=512")
#define ISA ISA_AVX512_VNNI
namespace avx512_vnni {
namespace {
#include "kernels.inc"
}
}  // namespace avx512_vnni
#undef ISA
#pragma GCC pop_options
#endif

#if HAVE_AMX
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,amx-tile,amx-int8,prefer-vector-width=512")
#define ISA ISA_AMX
namespace amx {
namespace {
#include "kernels.inc"
}
}  // namespace amx
#undef ISA
#pragma GCC pop_options
#endif

#if HAVE_NEON_DOTPROD
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod")
#define ISA ISA_NEON_DOTPROD
namespace neon_dotprod {
namespace {
#include "kernels.inc"
}
}  // namespace neon_dotprod
#undef ISA
#pragma GCC pop_options
#endif

#if HAVE_NEON_I8MM
#pragma GCC push_options
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#define ISA ISA_NEON_I8MM
namespace neon_i8mm {
namespace {
#include "kernels.inc"
}
}  // namespace neon_i8mm
#undef ISA
#pragma GCC pop_options
#endif

// --- the surface ------------------------------------------------------------------------------------

namespace {

struct Kernels {
  void (*project)(const void*, Share*);
  void (*attend)(const void*, Share*);
  void (*output)(const void*, Share*);
  void (*mlp)(const void*, Share*);
  void (*route)(const void*, Share*);
  void (*experts)(const void*, Share*);
  void (*head)(const void*, Share*);
  void (*choose)(const void*, Share*);
};

#define KERNELS(space)                                                       \
  Kernels {                                                                  \
    [](const void* a, Share* s) { space::project((const Layer*)a, s); },   \
        [](const void* a, Share* s) { space::attend((const Layer*)a, s); }, \
        [](const void* a, Share* s) { space::output((const Layer*)a, s); }, \
        [](const void* a, Share* s) { space::mlp((const Layer*)a, s); },       \
        [](const void* a, Share* s) { space::route((const Layer*)a, s); },     \
        [](const void* a, Share* s) { space::experts((const Layer*)a, s); },   \
        [](const void* a, Share* s) { space::head((const Head*)a, s); },     \
        [](const void* a, Share* s) { space::choose((const SampleTask*)a, s); }  \
  }

#if defined(__x86_64__)
// Whether the processor has matrix tiles of bytes, and the system lets this process use them.
bool has_amx() {
#if defined(OUTSTRIDE_AMX_STAND_IN)
  return true;
#endif
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
#if defined(__linux__)
  constexpr long request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1;
}

bool machine_has(int isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni");
  if (isa == ISA_AVX2) return avx2;
#if defined(OUTSTRIDE_AVX_VNNI_STAND_IN)
  if (isa == ISA_AVX_VNNI) return OUTSTRIDE_AVX_VNNI_STAND_IN == 1 ? avx512 : avx2;
#endif
  if (isa == ISA_AVX_VNNI) return avx2 && has_avx_vnni();
  if (isa == ISA_AVX512_VNNI) return avx512;
  return isa == ISA_AMX && avx512 && has_amx();
}
#elif defined(__aarch64__) && defined(__linux__)
bool machine_has(int isa) {
  constexpr unsigned long dotprod = 1 << 20, i8mm = 1 << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  if (isa == ISA_NEON_DOTPROD) return getauxval(AT_HWCAP) & dotprod;
  return isa == ISA_NEON_I8MM && getauxval(AT_HWCAP) & dotprod && getauxval(AT_HWCAP2) & i8mm;
}
#else
bool machine_has(int) { return false; }
#endif

// A build's kernels; false: this machine or this library does not have it.
bool kernels_of(int isa, Kernels* found) {
  if (isa == ISA_PORTABLE) return *found = KERNELS(portable), true;
  if (!machine_has(isa)) return false;
#if HAVE_AVX2
  if (isa == ISA_AVX2) return *found = KERNELS(avx2), true;
#endif
#if HAVE_AVX_VNNI
  if (isa == ISA_AVX_VNNI) return *found = KERNELS(avx_vnni), true;
#endif
#if HAVE_AVX512_VNNI
  if (isa == ISA_AVX512_VNNI) return *found = KERNELS(avx512_vnni), true;
#endif
#if HAVE_AMX
  if (isa == ISA_AMX) return *found = KERNELS(amx), true;
#endif
#if HAVE_NEON_DOTPROD
  if (isa == ISA_NEON_DOTPROD) return *found = KERNELS(neon_dotprod), true;
#endif
#if HAVE_NEON_I8MM
  if (isa == ISA_NEON_I8MM) return *found = KERNELS(neon_i8mm), true;
#endif
  return false;
}

// Weights are packed by the AVX2 build where the machine has it: the bits are the same.
#if HAVE_AVX2
#define PACKING(function) (machine_has(ISA_AVX2) ? avx2::function : portable::function)
#else
#define PACKING(function) portable::function
#endif

struct Engine {
  Pool pool;
  Kernels kernels;
};

void free_experts(ExpertSpace* w) {
  for (float* p : {w->normed, w->logits, w->shared, w->shares, w->pair_shares, w->middle, w->codes.scale,
                   w->codes.groups})
    free(p);
  for (int32_t* p : {w->chosen, w->places, w->pair_rows, w->pair_experts, w->starts, w->next, w->active, w->kept,
                     w->codes.sums})
    free(p);
  free(w->codes.bytes);
  *w = ExpertSpace{};
}

}  // namespace

extern "C" {

// The builds that this machine has, slowest first: their numbers to `out`, which has room for all of
// them. Returns how many.
int outstride_isas(int32_t* out) {
  int count = 0;
  Kernels found;
  for (int isa = 0; isa < ISAS; isa++)
    if (kernels_of(isa, &found)) out[count++] = isa;
  return count;
}

// How much scratch attention over this many rows needs.
int outstride_scratch(int group, int head_dim, int rows) {
  return attention_scratch(group, head_dim) + rows + 1;
}

// An engine with `threads` threads for at most `rows` rows of `depth` values. Null: out of memory, or
// a build that `outstride_isas` does not name.
void* outstride_open(int threads, int isa, int rows, int depth, int scratch) {
  Kernels kernels;
  if (threads < 1 || threads > MAX_THREADS || !kernels_of(isa, &kernels) || rows < 1 || depth < 1)
    return nullptr;
  Engine* e = new Engine();
  e->kernels = kernels;
  Pool* p = &e->pool;
  p->count = threads;
  p->wide = isa != ISA_PORTABLE;
  // Rows are read in blocks of sixteen: memory after the last row is read and not used.
  const size_t bytes = (size_t)2 * depth + 64;
  const size_t sums = sizeof(int32_t) * slices(depth), groups = (size_t)depth / 16 + 2;
  p->shared = {(int8_t*)aligned_alloc(64, (bytes * (rows + 16) + 63) / 64 * 64),
               (float*)malloc(sizeof(float) * rows), (int32_t*)malloc(sums * rows),
               (float*)calloc(groups * (rows + 16), sizeof(float))};
  bool sound = p->shared.bytes && p->shared.scale && p->shared.sums && p->shared.groups;
  for (int i = 0; i < threads; i++) {
    Share* s = &p->shares[i];
    p->codes[i] = {(int8_t*)aligned_alloc(64, (bytes * 16 + 63) / 64 * 64),
                   (float*)malloc(sizeof(float) * 4), (int32_t*)malloc(sums * 4),
                   (float*)calloc(groups * 4, sizeof(float))};
    *s = {i, threads, &p->codes[i], &p->shared,
          (float*)aligned_alloc(64, ((size_t)scratch * 4 + 127) / 64 * 64),
          (float*)aligned_alloc(64, ((size_t)depth * 4 + 127) / 64 * 64), p};
    sound = sound && p->codes[i].bytes && p->codes[i].scale && p->codes[i].sums &&
            p->codes[i].groups && s->scratch && s->rotated;
  }
  if (!sound) return nullptr;
  for (int i = 1; i < threads; i++)
    if (pthread_create(&p->threads[i], nullptr, serve, &p->shares[i])) return nullptr;
  return e;
}

// Buffers for layers with experts: for `rows` rows of `width` values. 1: out of memory.
int outstride_reserve_experts(void* engine, const Experts* e, int rows, int width) {
  Pool* p = &((Engine*)engine)->pool;
  free_experts(&p->experts);
  ExpertSpace* w = &p->experts;
  const size_t count = e->count, pairs = (size_t)rows * e->per_token, inner = (size_t)e->gate_up->tiles / count * 8;
  const size_t depth = std::max(e->gate_up->depth, e->down->depth);
  w->stride = (int)((count + 15) / 16 * 16 + 16 + (2 * count + 15) / 16 * 16);
  bool sound = true;
  const auto reserve = [&](auto** out, size_t values) {
    *out = (std::remove_reference_t<decltype(**out)>*)aligned_alloc(64, (values * sizeof(**out) + 127) / 64 * 64);
    sound = sound && *out;
  };
  reserve(&w->normed, (size_t)rows * width), reserve(&w->logits, (size_t)rows * w->stride);
  reserve(&w->shared, rows), reserve(&w->shares, pairs), reserve(&w->pair_shares, pairs);
  reserve(&w->chosen, pairs), reserve(&w->places, pairs);
  reserve(&w->pair_rows, pairs), reserve(&w->pair_experts, pairs);
  reserve(&w->starts, count + 1), reserve(&w->next, count), reserve(&w->active, count);
  reserve(&w->kept, (size_t)p->count * e->groups), reserve(&w->middle, pairs * inner);
  // Rows are read in blocks of sixteen, as in `outstride_open`.
  reserve(&w->codes.bytes, (2 * depth + 64) * (pairs + 16)), reserve(&w->codes.scale, pairs);
  reserve(&w->codes.sums, pairs * slices((int)depth)), reserve(&w->codes.groups, (depth / 16 + 2) * (pairs + 16));
  return sound ? 0 : 1;
}

void outstride_close(void* engine) {
  Engine* e = (Engine*)engine;
  Pool* p = &e->pool;
  announce(p, THE_END);
  for (int i = 1; i < p->count; i++) pthread_join(p->threads[i], nullptr);
  for (int i = 0; i < p->count; i++) {
    free(p->codes[i].bytes), free(p->codes[i].scale), free(p->codes[i].sums);
    free(p->codes[i].groups), free(p->shares[i].scratch), free(p->shares[i].rotated);
  }
  free(p->shared.bytes), free(p->shared.scale), free(p->shared.sums), free(p->shared.groups);
  free_experts(&p->experts);
  delete e;
}

void outstride_project(void* e, const Layer* a) { run(&((Engine*)e)->pool, ((Engine*)e)->kernels.project, a); }
void outstride_attend(void* e, const Layer* a) { run(&((Engine*)e)->pool, ((Engine*)e)->kernels.attend, a); }
void outstride_output(void* e, const Layer* a) { run(&((Engine*)e)->pool, ((Engine*)e)->kernels.output, a); }

// The router reads rows before the shared expert adds to them.
void outstride_mlp(void* engine, const Layer* a) {
  Engine* e = (Engine*)engine;
  if (a->experts) run(&e->pool, e->kernels.route, a);
  if (a->gate_up->tiles) run(&e->pool, e->kernels.mlp, a);
  if (a->experts) run(&e->pool, e->kernels.experts, a);
}

// Consecutive layers in one call: the caller's thread may do something else meanwhile.
void outstride_layers(void* engine, const Layer* a, int count) {
  for (int i = 0; i < count; i++) {
    outstride_project(engine, a + i);
    outstride_attend(engine, a + i);
    outstride_output(engine, a + i);
    outstride_mlp(engine, a + i);
  }
}

void outstride_choose(void* e, const SampleTask* a) { run(&((Engine*)e)->pool, ((Engine*)e)->kernels.choose, a); }
void outstride_head(void* e, const Head* a) { run(&((Engine*)e)->pool, ((Engine*)e)->kernels.head, a); }

// Entries that were made elsewhere to their slots: [rows][kv_heads][head_dim] each.
void outstride_keep(const Layer* l, const int64_t* slots, int rows, const float* keys,
                    const float* values) {
  const Pass* a = l->pass;
  for (int i = 0; i < rows * a->kv_heads; i++)
    portable::keep(l, i % a->kv_heads, slots[i / a->kv_heads], keys + (size_t)i * a->head_dim,
                   values + (size_t)i * a->head_dim);
}

// Bytes of one head of sixteen cached positions, keys or values; 0: it has too many dimensions.
int outstride_record(int head_dim) {
  return head_dim > MAX_HEAD_DIM ? 0 : (int)record_of(head_dim);
}

// Copies KV of all layers between slots, all read before any is written. `scratch` holds one layer's.
void outstride_move(const Layer* layers, int count, const int64_t* sources, const int64_t* targets,
                    int entries, uint8_t* scratch) {
  const auto copy = [](uint8_t* entry, uint8_t* held, int bytes, bool write) {
    memcpy(write ? entry : held, write ? held : entry, bytes);
  };
  for (int i = 0; i < count; i++) {
    const int heads = layers[i].pass->kv_heads, size = layers[i].pass->head_dim;
    const size_t record = record_of(size), lines = record / 64;
    for (int write = 0; write < 2; write++) {
      const int64_t* slots = write ? targets : sources;
      uint8_t* held = scratch;
      for (int e = 0; e < entries * heads; e++) {
        const int64_t slot = slots[e / heads], lane = slot % 16;
        const size_t place = (slot / 16 * heads + e % heads) * record;
        uint8_t *keys = layers[i].keys + place, *values = layers[i].values + place;
        for (size_t n = 0; n < lines; n++, held += 4) copy(keys + n * 64 + lane * 4, held, 4, write);
        for (size_t n = 0; n < (lines - 1) * 4; n++, held++)
          copy(values + (lane / 4 * (lines - 1) * 4 + n) * 4 + lane % 4, held, 1, write);
        copy(values + (lines - 1) * 64 + lane * 4, held, 4, write);
        held += 4;
      }
    }
  }
}

// Rows of float32, [channels][k], to tiles of int8; see `pack_int8`. `scratch`: eighteen rows.
void outstride_pack(const float* weights, int channels, int k, int tiles, int depth, const HadamardRotation* rotation,
                    float* scratch, uint8_t* data, float* scale, int32_t* zero) {
  PACKING(pack_int8)(weights, channels, k, tiles, depth, rotation, scratch, data, scale, zero);
}

// Rows of float32, [channels][k], to tiles of int4; see `pack_int4`. `scratch`: one row.
int outstride_pack_int4(const float* weights, int channels, int k, int tiles, int depth, float* scratch,
                        uint8_t* data) {
  return PACKING(pack_int4)(weights, channels, k, tiles, depth, scratch, data);
}

// Rows of a file with 4-bit blocks to tiles of int4; see `repack_int4`.
int outstride_repack_int4(const uint8_t* const* rows, int kind, int groups, int tiles, int depth, uint8_t* data) {
  return PACKING(repack_int4)(rows, kind, groups, tiles, depth, data);
}

// Rows of a GGUF file to float32; see `dequantize`.
void outstride_dequantize(const uint8_t* const* rows, int kind, int count, int k, float* out) {
  PACKING(dequantize)(rows, kind, count, k, out);
}

// A checksum of bytes: every change of a single word changes it. Runs at the speed of memory.
uint64_t outstride_checksum(const uint8_t* data, int64_t size, uint64_t seed) {
  constexpr uint64_t factor = 0x9E3779B97F4A7C15ull;
  uint64_t lanes[8];
  for (int i = 0; i < 8; i++) lanes[i] = (seed + i + 1) * factor;
  const auto mix = [](uint64_t lane, uint64_t word) {
    lane = (lane ^ word) * factor;
    return lane ^ lane >> 32;
  };
  int64_t at = 0;
  for (; at + 64 <= size; at += 64)
    for (int i = 0; i < 8; i++) {
      uint64_t word;
      memcpy(&word, data + at + i * 8, 8);
      lanes[i] = mix(lanes[i], word);
    }
  uint64_t total = mix(seed, (uint64_t)size);
  for (; at < size; at++) total = mix(total, data[at]);
  for (int i = 0; i < 8; i++) total = mix(total, lanes[i]);
  return total;
}

// Rows of a packed matrix as float32: the embedding of a model with tied embeddings. `scratch`: one
// row of the matrix.
void outstride_rows(const Matrix* m, const int64_t* ids, int count, int k, int width, float* scratch,
                    float* out) {
  for (int r = 0; r < count; r++) {
    const int64_t n = ids[r];
    const uint8_t* tile = m->data + (size_t)(n / 16) * m->depth * 16 + n % 16 * 4;
    for (int i = 0; i < m->depth; i++)
      scratch[i] = (float)(tile[(size_t)(i / 4) * 64 + i % 4] - m->zero[n]) * m->scale[n];
    portable::rotate_row_back(scratch, m->depth, m->rotation);
    memcpy(out + (size_t)r * width, scratch, sizeof(float) * k);
  }
}

}  // extern "C"

#include "kernels.recurrent.inc"
