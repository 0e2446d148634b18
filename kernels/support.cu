// Small kernels around a call: inputs, reference, comparison, barrier, copies, empty call, delay.
// No CuTe here, so that it compiles in a moment.

#include <cuda_bf16.h>

using u64 = unsigned long long;
using bf16 = __nv_bfloat16;
constexpr int kLine = 32;                   // uint32 in the 128-byte line of one flag

struct PollError { unsigned code, index, target, value; };
constexpr unsigned kBarrierPoll = 4;        // as in mlp.cu

__device__ u64 mix64(u64 z) {               // finaliser of SplitMix64 (Steele et al., 2014)
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

__device__ long long now_ns() {
  long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// The rows x cols block at (row0, col0) of a matrix `width` wide of N(0, scale^2). An element
// depends only on seed, row and column; rows of `out` are `pitch` elements apart.
extern "C" __global__ void fill_normal(bf16* out, long long rows, long long cols, long long row0,
                                       long long col0, long long width, long long pitch, u64 seed,
                                       float scale) {
  long long const count = rows * cols, step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    u64 const at = (u64)(row0 + i / cols) * width + col0 + i % cols;
    u64 const bits = mix64(mix64(seed) + at * 0x9e3779b97f4a7c15ull);
    float const u = ((unsigned)(bits >> 40) + 0.5f) * 0x1p-24f;
    float const angle = (unsigned)(bits & 0xffffff) * (6.2831853f * 0x1p-24f);
    out[i / cols * pitch + i % cols] =
        __float2bfloat16(sqrtf(-2.0f * logf(u)) * cosf(angle) * scale);
  }
}

// C = A B^T in double; A is m x k, B is n x k, both bf16 with their pitches. C is rounded to bf16
// (`half`) or kept in fp32 (`full`), whichever is not null. 64 x 64 tiles, 256 threads, 4 x 4 sums a
// thread.
extern "C" __global__ void reference_gemm(bf16 const* a, bf16 const* b, bf16* half, float* full,
                                          int m, int n, int k, int a_pitch, int b_pitch) {
  constexpr int kTile = 64, kDepth = 16;
  __shared__ double sa[kDepth][kTile + 2], sb[kDepth][kTile + 2];
  int const tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  int const row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile;
  double acc[4][4] = {};
  for (int k0 = 0; k0 < k; k0 += kDepth) {
    for (int i = threadIdx.x; i < kTile * kDepth; i += blockDim.x) {
      int const r = i / kDepth, d = i % kDepth;
      bool const in_k = k0 + d < k;
      sa[d][r] = in_k && row0 + r < m ? (double)(float)a[(u64)(row0 + r) * a_pitch + k0 + d] : 0.0;
      sb[d][r] = in_k && col0 + r < n ? (double)(float)b[(u64)(col0 + r) * b_pitch + k0 + d] : 0.0;
    }
    __syncthreads();
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
      double x[4], y[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) { x[i] = sa[d][ty + 16 * i]; y[i] = sb[d][tx + 16 * i]; }
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) acc[i][j] += x[i] * y[j];
    }
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 4; ++j) {
      int const row = row0 + ty + 16 * i, col = col0 + tx + 16 * j;
      if (row >= m || col >= n) continue;
      if (half) half[(u64)row * n + col] = __float2bfloat16((float)acc[i][j]);
      if (full) full[(u64)row * n + col] = (float)acc[i][j];
    }
}

// Sums over columns [col0, col1) of an m x n output:
// result = {sum (out - ref)^2, sum ref^2, max |out - ref|, NaNs, elements whose bits differ}.
// `bits` (may be null) is the output of another run, compared bit for bit.
extern "C" __global__ void compare(bf16 const* out, float const* ref, bf16 const* bits, int m,
                                   int n, int col0, int col1, double* result) {
  double diff2 = 0, ref2 = 0, worst = 0;
  u64 nans = 0, differ = 0;
  long long const width = col1 - col0, count = m * width;
  long long const step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step) {
    long long const at = i / width * n + col0 + i % width;
    float const value = out[at];
    if (isnan(value)) { ++nans; continue; }
    double const d = (double)value - ref[at];
    diff2 += d * d;
    ref2 += (double)ref[at] * ref[at];
    worst = fmax(worst, fabs(d));
    if (bits) differ += __bfloat16_as_ushort(out[at]) != __bfloat16_as_ushort(bits[at]);
  }
  atomicAdd(&result[0], diff2);
  atomicAdd(&result[1], ref2);
  atomicMax((u64*)&result[2], (u64)__double_as_longlong(worst));   // order of doubles >= 0
  if (nans) atomicAdd(&result[3], (double)nans);
  if (differ) atomicAdd(&result[4], (double)differ);
}

// All GPUs meet: adds 1 to the counter of each, then waits until all have added to ours.
// `state` on each GPU: [0] counter, [kLine] meetings so far.
extern "C" __global__ void barrier(unsigned* const* peers, int gpus, unsigned* state,
                                   PollError* error, long long timeout_ns) {
  if (threadIdx.x != 0) return;
  unsigned const target = (state[kLine] + 1) * gpus;
  state[kLine] += 1;
  for (int g = 0; g < gpus; ++g)
    asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(peers[g]) : "memory");
  long long const deadline = now_ns() + timeout_ns;
  unsigned value;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(state) : "memory");
    if ((int)(value - target) >= 0) return;
  } while (now_ns() < deadline);
  if (atomicCAS(&error->code, 0u, kBarrierPoll) == 0u) {
    error->target = target;
    error->value = value;
  }
}

// Sum over GPUs of bf16 partials in two shots, for tensor parallelism without NCCL: each GPU reads
// its shard of every partial, adds in fp32 in the order of GPUs, and writes it to every Y2.
// `flags` on each GPU: line g: calls for which GPU g's partial is ready, line 8 + g: blocks of GPU
// g that are done with this GPU, in all calls. `calls`: finished calls; the last block moves it on.
struct TwoShot {
  uint4 const* partial[8];
  uint4* y2[8];
  unsigned* flags[8];
  unsigned* calls;
  PollError* error;
  long long vectors, timeout_ns;            // of 8 elements
  int gpus, gpu;
};

__device__ void await(unsigned* flag, unsigned target, TwoShot const& p) {
  long long const deadline = now_ns() + p.timeout_ns;
  unsigned value;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    if ((int)(value - target) >= 0) return;
  } while (now_ns() < deadline);
  if (atomicCAS(&p.error->code, 0u, kBarrierPoll) == 0u) {
    p.error->target = target;
    p.error->value = value;
  }
}

__device__ void tell(unsigned* flag) {
  asm volatile("red.release.sys.global.add.u32 [%0], 1;" ::"l"(flag) : "memory");
}

extern "C" __global__ void two_shot(TwoShot const* params) {
  TwoShot const& p = *params;
  unsigned const call = p.calls[0] + 1;
  if (threadIdx.x < p.gpus) {
    if (blockIdx.x == 0) tell(p.flags[threadIdx.x] + p.gpu * kLine);
    await(p.flags[p.gpu] + threadIdx.x * kLine, call, p);
  }
  __syncthreads();
  long long const begin = p.vectors * p.gpu / p.gpus, end = p.vectors * (p.gpu + 1) / p.gpus;
  long long const step = (long long)gridDim.x * blockDim.x;
  for (long long i = begin + blockIdx.x * blockDim.x + threadIdx.x; i < end; i += step) {
    float sum[8] = {};
    for (int g = 0; g < p.gpus; ++g) {
      uint4 const raw = __ldcv(p.partial[g] + i);
      __nv_bfloat162 const* pair = reinterpret_cast<__nv_bfloat162 const*>(&raw);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float2 const both = __bfloat1622float2(pair[j]);
        sum[2 * j] += both.x;
        sum[2 * j + 1] += both.y;
      }
    }
    uint4 out;
    __nv_bfloat162* pair = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
    for (int j = 0; j < 4; ++j) pair[j] = __floats2bfloat162_rn(sum[2 * j], sum[2 * j + 1]);
    for (int g = 0; g < p.gpus; ++g) p.y2[(p.gpu + g) % p.gpus][i] = out;
  }
  __syncthreads();
  if (threadIdx.x < p.gpus) {
    __threadfence_system();
    tell(p.flags[threadIdx.x] + (8 + p.gpu) * kLine);
    if (blockIdx.x == 0) await(p.flags[p.gpu] + (8 + threadIdx.x) * kLine, call * gridDim.x, p);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    if (atomicAdd(&p.calls[kLine], 1u) + 1 == gridDim.x) {
      p.calls[kLine] = 0;
      p.calls[0] = call;
    }
  }
}

// Copies 16-byte words from the memory of a peer: a copy engine takes 9 us for the smallest copy.
struct Words {
  uint4* to;
  uint4 const* from;
  long long count;
};

extern "C" __global__ void pull(Words const words) {
  long long const step = (long long)gridDim.x * blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < words.count; i += step)
    words.to[i] = __ldcv(words.from + i);
}

extern "C" __global__ void nothing() {}

// Occupies a stream for a while: a GPU that is late.
extern "C" __global__ void delay(long long ns) {
  long long const end = now_ns() + ns;
  while (now_ns() < end) {}
}

// The two halves of the peer probe: write a pattern, then read it back.
extern "C" __global__ void probe_write(unsigned* to, unsigned value) { *to = value; }
