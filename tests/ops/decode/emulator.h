// A block of GPU threads on the CPU, one fiber a thread, for CUDA C++ that keeps its PTX behind a few functions. A copy
// that was not awaited has not happened; shared memory starts as NaN; a warp's matrix product waits for all its lanes.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define DEVICE static inline
#define __global__
#define __launch_bounds__(...)
#define __restrict__
struct Index { unsigned x = 0, y = 0, z = 0; };

namespace emulator {
struct Copy { void* to; const void* from; int bytes; };
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  std::vector<std::vector<Copy>> groups{1};
  bool done = false;
};
struct Meeting { int arrived = 0; unsigned generation = 0; };
inline std::vector<Fiber> fibers;
inline std::vector<Meeting> warps;
inline Meeting block;
inline std::vector<unsigned> operands;  // [thread][8]
inline std::vector<float> results;      // [thread][4]
inline ucontext_t scheduler;
inline int current;
inline std::function<void()> body;
}  // namespace emulator
inline Index threadIdx, blockIdx, gridDim;
inline std::vector<unsigned char> shared_bytes;
#define shared_memory ((Quad*)shared_bytes.data())

namespace emulator {
inline void pass_on() {
  Fiber& own = fibers[current];
  swapcontext(&own.context, &scheduler);
}
inline void meet(Meeting& meeting, int count, const std::function<void()>& at_the_end = [] {}) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    at_the_end();
    meeting.arrived = 0, meeting.generation++;
    return;
  }
  while (meeting.generation == generation) pass_on();
}
inline void enter() {
  body();
  fibers[current].done = true;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void launch(Index grid, int threads, size_t shared, std::function<void()> kernel) {
  gridDim = grid, body = std::move(kernel);
  for (unsigned y = 0; y < grid.y; y++)
    for (unsigned x = 0; x < grid.x; x++) {
      blockIdx.x = x, blockIdx.y = y;
      shared_bytes.assign(shared, 0xFF);
      fibers = std::vector<Fiber>(threads);
      warps.assign(threads / 32, {});
      block = {};
      operands.assign(threads * 8, 0), results.assign(threads * 4, 0);
      for (auto& fiber : fibers) {
        fiber.stack.resize(1 << 16);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, enter, 0);
      }
      for (bool left = true; left;) {
        left = false;
        for (current = 0; current < threads; current++)
          if (!fibers[current].done) {
            threadIdx.x = current, left = true;
            swapcontext(&scheduler, &fibers[current].context);
          }
      }
    }
}
inline float of_bits(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline unsigned bits_of(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
inline unsigned rounded(float f) {  // bf16, ties to even
  const unsigned u = bits_of(f);
  return (u & 0x7FFFFFFF) > 0x7F800000 ? 0x7FFF : (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
inline float half(unsigned pair, int which) { return of_bits(which ? pair & 0xFFFF0000u : pair << 16); }
}  // namespace emulator

inline void __syncthreads() { emulator::meet(emulator::block, emulator::fibers.size()); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  using namespace emulator;
  const int me = current;
  std::memcpy(&operands[me * 8], &value, sizeof(T));
  meet(warps[me / 32], 32);
  T other;
  std::memcpy(&other, &operands[(me ^ mask) * 8], sizeof(T));
  meet(warps[me / 32], 32);
  return other;
}

typedef unsigned int u32;
typedef unsigned short u16;
struct Quad;
template <class T, class Q = Quad> Q load_quad(const T* p) {
  if ((size_t)p % 16) std::abort();
  Q q;
  std::memcpy(&q, p, 16);
  return q;
}
template <int BYTES> void copy_async(void* to, const void* from) {
  if ((size_t)to % BYTES || (size_t)from % BYTES) std::abort();
  emulator::fibers[emulator::current].groups.back().push_back({to, from, BYTES});
}
inline void commit_copies() { emulator::fibers[emulator::current].groups.emplace_back(); }
template <int LEFT> void await_copies() {
  auto& groups = emulator::fibers[emulator::current].groups;
  while ((int)groups.size() > LEFT + 1) {
    for (auto& copy : groups.front()) std::memcpy(copy.to, copy.from, copy.bytes);
    groups.erase(groups.begin());
  }
}
inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  using namespace emulator;
  const int me = current, first = me / 32 * 32;
  const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
  std::copy(mine, mine + 6, &operands[me * 8]);
  std::copy(c, c + 4, &results[me * 4]);
  meet(warps[me / 32], 32, [&] {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++)
      for (int e = 0; e < 2; e++) {
        const u32* o = &operands[(first + lane) * 8];
        const int g = lane / 4, t = lane % 4;
        a[g][t * 2 + e] = half(o[0], e), a[g + 8][t * 2 + e] = half(o[1], e);
        a[g][t * 2 + 8 + e] = half(o[2], e), a[g + 8][t * 2 + 8 + e] = half(o[3], e);
        b[t * 2 + e][g] = half(o[4], e), b[t * 2 + 8 + e][g] = half(o[5], e);
      }
    for (int lane = 0; lane < 32; lane++)
      for (int i = 0; i < 4; i++) {
        float& sum = results[(first + lane) * 4 + i];
        for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      }
  });
  std::copy(&results[me * 4], &results[me * 4] + 4, c);
  meet(warps[me / 32], 32);
}
inline u32 nibbles(u32 word) { return (word & 0x000F000Fu) | 0x43004300u; }
inline u32 fma2(u32 a, u32 b, u32 c) {
  using namespace emulator;
  return rounded(half(a, 0) * half(b, 0) + half(c, 0)) | rounded(half(a, 1) * half(b, 1) + half(c, 1)) << 16;
}
inline u32 to_bf16x2(float low, float high) { return emulator::rounded(low) | emulator::rounded(high) << 16; }
template <typename T> inline void keep(T*&) {}
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline unsigned to_e4m3(float x) {  // 3 bits behind the point from 2^-6 on, steps of 2^-9 below; ties to even
  const float size = std::fmin(std::fabs(x), 448.0f);
  const int power = size < 0x1p-6f ? -6 : std::ilogb(size);
  const float steps = std::nearbyint(std::ldexp(size, 3 - power));  // of 2^(power - 3); 8 and more are normal
  return (std::signbit(x) ? 128u : 0u) | (unsigned)(int)((power + 6) * 8 + steps);
}
inline u32 to_e4m3x2(float low, float high) { return to_e4m3(low) | to_e4m3(high) << 8; }
inline float as_float(u32 bits) { return emulator::of_bits(bits); }
inline u16 load_half(const u16* p) { return *p; }
template <class T> T load_shared_by_blocks(const T* p) { return *p; }
inline int atomicAdd(int* p, int more) { const int before = *p; *p += more; return before; }
inline void __threadfence() {}
inline void await_kernel_before() {}
inline void let_next_kernel_start() {}
