// Replays recorded calls of the kernels and compares every byte that they write: `replay BUILD FILE`.
//
// It needs no Python, so it runs where only an emulator is: linked statically, under qemu-aarch64.
// recording.py writes the file: little-endian, records one after the other, each with a kind first.

#if defined(OUTSTRIDE_AMX_STAND_IN)
#include "amx_stand_in.h"
#endif
#include "../../../src/outstride/ops/cpu/kernels.cpp"

#include <stdio.h>

#include <string>
#include <vector>

namespace {

enum Kind : uint32_t { END = 0, MEMORY = 1, POINTER = 2, OPEN = 3, CALL = 4, EXPECT = 5 };
enum Argument : uint32_t { NUMBER = 0, ADDRESS = 1, ENGINE = 2 };

const char* const NAMES[ISAS] = {"portable", "avx2",         "avx-vnni", "avx512-vnni",
                                 "amx",      "neon-dotprod", "neon-i8mm"};

struct Reader {
  FILE* file;
  void bytes(void* out, size_t size) {
    if (fread(out, 1, size, file) != size) {
      fprintf(stderr, "the recording ends too early\n");
      exit(2);
    }
  }
  template <typename T>
  T next() {
    T value;
    bytes(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string found(next<uint32_t>(), ' ');
    bytes(&found[0], found.size());
    return found;
  }
};

struct Memory {
  uint8_t* data = nullptr;       // that kernels work on
  std::vector<uint8_t> right{};  // the same bytes as they should be
};

struct Replay {
  Reader in;
  int isa;
  std::vector<Memory> memory{};
  void* engine = nullptr;
  std::string call = "";
  int calls = 0, wrong = 0;

  Memory* here(uint32_t id) {
    if (id >= memory.size()) memory.resize(id + 1);
    return &memory[id];
  }

  void* address(uint32_t id, uint64_t offset) { return here(id)->data + offset; }

  // Bytes of the recording, to where they should be.
  Memory* fill(uint64_t* first, uint64_t* count) {
    Memory* m = here(in.next<uint32_t>());
    const size_t size = in.next<uint64_t>();
    if (!m->data) {
      m->data = (uint8_t*)aligned_alloc(64, (size + 63) / 64 * 64 + 64);
      m->right.resize(size);
    }
    *first = in.next<uint64_t>(), *count = in.next<uint64_t>();
    in.bytes(m->right.data() + *first, *count);
    return m;
  }

  void change() {
    uint64_t first, count;
    const Memory* m = fill(&first, &count);
    memcpy(m->data + first, m->right.data() + first, count);
  }

  void point() {
    const uint32_t id = in.next<uint32_t>();
    const uint64_t offset = in.next<uint64_t>();
    const uint32_t target = in.next<uint32_t>();
    void* to = address(target, in.next<uint64_t>());
    memcpy(address(id, offset), &to, sizeof to);
    memcpy(here(id)->right.data() + offset, &to, sizeof to);
  }

  void open() {
    const int32_t rows = in.next<int32_t>(), depth = in.next<int32_t>(), scratch = in.next<int32_t>();
    if (engine) outstride_close(engine);
    engine = outstride_open(1, isa, rows, depth, scratch);
    if (!engine) {
      fprintf(stderr, "this machine does not have the build %s\n", NAMES[isa]);
      exit(2);
    }
  }

  void run() {
    call = in.text();
    const uint32_t count = in.next<uint32_t>();
    std::vector<uint64_t> a(10);
    for (uint32_t i = 0; i < count; i++) {
      const uint32_t kind = in.next<uint32_t>();
      if (kind == ENGINE) a[i] = (uint64_t)engine;
      if (kind == NUMBER) a[i] = in.next<uint64_t>();
      if (kind == ADDRESS) {
        const uint32_t id = in.next<uint32_t>();
        a[i] = (uint64_t)address(id, in.next<uint64_t>());
      }
    }
    const auto n = [&](int i) { return (int)a[i]; };
    const auto p = [&](int i) { return (void*)a[i]; };
    calls++;
    if (call == "project") return outstride_project(p(0), (Layer*)p(1));
    if (call == "attend") return outstride_attend(p(0), (Layer*)p(1));
    if (call == "output") return outstride_output(p(0), (Layer*)p(1));
    if (call == "mlp") return outstride_mlp(p(0), (Layer*)p(1));
    if (call == "reserve_experts") return (void)outstride_reserve_experts(p(0), (Experts*)p(1), n(2), n(3));
    if (call == "head") return outstride_head(p(0), (Head*)p(1));
    if (call == "choose") return outstride_choose(p(0), (SampleTask*)p(1));
    if (call == "keep")
      return outstride_keep((Layer*)p(0), (int64_t*)p(1), n(2), (float*)p(3), (float*)p(4));
    if (call == "move")
      return outstride_move((Layer*)p(0), n(1), (int64_t*)p(2), (int64_t*)p(3), n(4), (uint8_t*)p(5));
    if (call == "pack")
      return outstride_pack((float*)p(0), n(1), n(2), n(3), n(4), (HadamardRotation*)p(5), (float*)p(6),
                            (uint8_t*)p(7), (float*)p(8), (int32_t*)p(9));
    if (call == "pack_int4")
      return (void)outstride_pack_int4((float*)p(0), n(1), n(2), n(3), n(4), (float*)p(5), (uint8_t*)p(6));
    if (call == "repack_int4")
      return (void)outstride_repack_int4((uint8_t**)p(0), n(1), n(2), n(3), n(4), (uint8_t*)p(5));
    if (call == "dequantize")
      return outstride_dequantize((uint8_t**)p(0), n(1), n(2), n(3), (float*)p(4));
    if (call == "rows")
      return outstride_rows((Matrix*)p(0), (int64_t*)p(1), n(2), n(3), n(4), (float*)p(5), (float*)p(6));
    fprintf(stderr, "an unknown kernel: %s\n", call.c_str());
    exit(2);
  }

  void compare() {
    uint64_t first, count;
    const Memory* m = fill(&first, &count);
    const size_t size = m->right.size();
    if (!memcmp(m->data, m->right.data(), size)) return;
    size_t at = 0;
    while (m->data[at] == m->right[at]) at++;
    printf("%s: call %d, %s: memory %zu differs from byte %zu of %zu on\n", NAMES[isa], calls,
           call.c_str(), (size_t)(m - memory.data()), at, size);
    memcpy(m->data, m->right.data(), size);  // later calls are judged by themselves
    wrong++;
  }
};

}  // namespace

int main(int count, char** arguments) {
  int isa = 0;
  while (count == 3 && isa < ISAS && strcmp(arguments[1], NAMES[isa])) isa++;
  FILE* file = count == 3 ? fopen(arguments[2], "rb") : nullptr;
  if (!file || isa == ISAS) {
    fprintf(stderr, "usage: replay BUILD RECORDING\n");
    return 2;
  }
  Replay r{{file}, isa};
  for (uint32_t kind; (kind = r.in.next<uint32_t>()) != END;) {
    if (kind == MEMORY) r.change();
    if (kind == POINTER) r.point();
    if (kind == OPEN) r.open();
    if (kind == CALL) r.run();
    if (kind == EXPECT) r.compare();
  }
  printf("%s: %d calls, %d differences\n", NAMES[isa], r.calls, r.wrong);
  return r.wrong ? 1 : 0;
}
