// The instructions of AMX in plain C++, for machines without them: eight tiles per thread.
//
// Included before kernels.cpp, which sees these names instead of the compiler's. Wrong shapes abort, as
// they would fault on a processor.

#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct StandInTiles {
  uint8_t config[64];
  uint8_t data[8][16][64];

  int rows(int t) const { return config[48 + t]; }
  int bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
};

static thread_local StandInTiles stand_in;

static inline void stand_in_check(bool right, const char* what) {
  if (right) return;
  fprintf(stderr, "tiles: %s\n", what);
  abort();
}

static inline void stand_in_config(const void* config) {
  memcpy(stand_in.config, config, 64);
  stand_in_check(stand_in.config[0] == 1, "palette 1 is the only one");
  for (int t = 0; t < 8; t++)
    stand_in_check(stand_in.rows(t) <= 16 && stand_in.bytes(t) <= 64, "a tile has 16 rows of 64 bytes");
  memset(stand_in.data, 0, sizeof stand_in.data);
}

static inline void stand_in_release() { memset(&stand_in, 0, sizeof stand_in); }

static inline void stand_in_zero(int t) {
  stand_in_check(stand_in.rows(t) > 0, "a tile that was not configured");
  memset(stand_in.data[t], 0, sizeof stand_in.data[t]);
}

static inline void stand_in_load(int t, const void* base, size_t stride) {
  stand_in_zero(t);
  for (int r = 0; r < stand_in.rows(t); r++)
    memcpy(stand_in.data[t][r], (const uint8_t*)base + r * stride, stand_in.bytes(t));
}

static inline void stand_in_store(int t, void* base, size_t stride) {
  stand_in_check(stand_in.rows(t) > 0, "a tile that was not configured");
  for (int r = 0; r < stand_in.rows(t); r++)
    memcpy((uint8_t*)base + r * stride, stand_in.data[t][r], stand_in.bytes(t));
}

// Signed bytes times unsigned ones, four at a time.
static inline void stand_in_multiply(int sums, int a, int b) {
  const int depth = stand_in.bytes(a) / 4;
  stand_in_check(stand_in.rows(sums) == stand_in.rows(a) && stand_in.bytes(sums) == stand_in.bytes(b) &&
                     stand_in.rows(b) == depth,
                 "shapes of a product");
  for (int m = 0; m < stand_in.rows(a); m++)
    for (int n = 0; n < stand_in.bytes(b) / 4; n++) {
      int32_t sum;
      memcpy(&sum, stand_in.data[sums][m] + n * 4, 4);
      for (int k = 0; k < depth * 4; k++)
        sum += (int32_t)(int8_t)stand_in.data[a][m][k] * stand_in.data[b][k / 4][n * 4 + k % 4];
      memcpy(stand_in.data[sums][m] + n * 4, &sum, 4);
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbsud
#define _tile_loadconfig(config) stand_in_config(config)
#define _tile_release() stand_in_release()
#define _tile_zero(t) stand_in_zero(t)
#define _tile_loadd(t, base, stride) stand_in_load(t, base, stride)
#define _tile_stored(t, base, stride) stand_in_store(t, base, stride)
#define _tile_dpbsud(sums, a, b) stand_in_multiply(sums, a, b)
