// A CTA-pipelined MLP for sm_90a: Y1 = X W_up^T, Y2 = Y1 W_down^T, bf16 in and out, fp32 sums.
//
// Persistent CTAs, one an SM at most, walk this GPU's tile list: first tiles of `up`, whose results
// are stored into the Y1 of every GPU that needs them, then tiles of `down`. A `down` tile sums over
// Y1 segment by segment, beginning with its own GPU's, and waits for each as it comes to it, so that
// transfers hide behind sums. The list is data (ctatune/schedule.py).
//
//   warp              role         waits for                        signals
//   0                 load         empty[stage], panel counters     full[stage] (TMA bytes)
//   1                 store        d_full[slot], started, arrived   d_empty[slot], panels, arrived
//   4..11 (2 groups)  math         full[stage], d_empty[slot]       empty[stage], d_full[slot]
//
// Flags that GPUs share only grow; each stands on its own 128-byte line of the GPU that polls it:
//   panels[2][panels][segments]  tiles that arrived here, by parity of the call; a segment is the
//                      part of Y1's columns that one GPU computes
//   started[gpu]       calls that this peer has started
//   arrived            CTAs of peers that have delivered all their Y2 tiles here
// A GPU in call e stores Y1 into a peer that has started call e - 1: that peer has finished e - 2,
// the last reader of the same parity. It stores Y2 into a peer that has started call e: whatever
// read the Y2 of call e - 1 on that peer's stream is done.
//
// Defined before this text (ctatune/jit.py): kUpM kUpN kDownM kDownN kStages kSlabs kSkipWait.

#include <cute/tensor.hpp>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/arch/mma_sm90_gmma.hpp>
#include <cutlass/arch/barrier.h>
#include <cutlass/arch/reg_reconfig.h>

using namespace cute;
using bf16 = cutlass::bfloat16_t;
using Barrier = cutlass::arch::ClusterBarrier;
using TransactionBarrier = cutlass::arch::ClusterTransactionBarrier;

constexpr int kMaxGpus = 8;
constexpr int kTileK = 64;                  // 128 bytes of bf16: one row of the 128-byte swizzle
constexpr int kRowBytes = 128;
constexpr int kLine = 32;                   // uint32 in the 128-byte line of one flag
constexpr int kSegmentUnit = 256;           // in the first word of a tile, above the layer
constexpr int kMathGroups = 2;
constexpr int kThreads = 128 * (1 + kMathGroups);
constexpr int kMaxM = kUpM > kDownM ? kUpM : kDownM;
constexpr int kMaxN = kUpN > kDownN ? kUpN : kDownN;
constexpr int kABytes = kMaxM * kRowBytes;
constexpr int kStageBytes = kABytes + kMaxN * kRowBytes;
constexpr int kSlabBytes = kMaxM * kRowBytes;

struct alignas(128) TensorMap { char opaque[128]; };

// What a poll found when its time ran out; `code` 0 means that nothing went wrong.
struct PollError { uint32_t code, index, target, value; };
enum PollCode : uint32_t { kPanelPoll = 1, kStartedPoll = 2, kArrivedPoll = 3, kBarrierPoll = 4 };

// Mirrored by ctatune/launch.py. Pointers `*_out` lead into the memory of peers (or our own).
struct Params {
  TensorMap x, w_up, w_down, y1;
  TensorMap y1_out[kMaxGpus], y2_out[kMaxGpus];
  uint32_t* panels_out[kMaxGpus];
  uint32_t* arrived_out[kMaxGpus];
  uint32_t* started_out[kMaxGpus];
  uint32_t* panels;
  uint32_t* started;
  uint32_t* arrived;
  uint32_t* calls;                          // [0]: finished calls, [kLine]: CTAs that left this one
  PollError* error;
  int4 const* tiles;                        // {layer + 256 segment, row, row in weight, column}
  long long* stamps;                        // null, or kStamps times a tile
  long long timeout_ns;
  int tile_count, m, up_k_blocks, down_k_blocks;
  int x_box_bytes, y1_box_bytes;            // bytes of one A box: rows that exist, not tile rows
  int panel_count, segment_count, arrivals, pace_ns;
  int segment_tiles[kMaxGpus];              // of one panel
  int segment_block[kMaxGpus + 1];          // first K block of `down` in each segment, and the end
  int y1_outs, y2_outs, arrived_outs, peers;
  int y1_own, y2_own;                       // 1 when destination 0 is this GPU, else 0
  int y1_gpu[kMaxGpus], y2_gpu[kMaxGpus];
};

__device__ uint32_t load_acquire(uint32_t const* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ void add_release(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ void prefetch_map(TensorMap const& map) {
  prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&map));
}

__device__ uint32_t* panel_flag(uint32_t* panels, Params const& p, uint32_t epoch, int panel,
                                int segment) {
  return panels + (((epoch & 1) * p.panel_count + panel) * p.segment_count + segment) * kLine;
}

__device__ long long now_ns() {
  long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Times of a tile, in ns of %globaltimer, for a measured timeline.
enum Stamp { kMathWaits, kMathStarts, kMathEnds, kSlabsWritten, kStoreStarts, kStored, kLoadStarts,
             kPanelReady, kStamps };

__device__ void stamp(Params const& p, int tile, Stamp which) {
  if (p.stamps) p.stamps[tile * kStamps + which] = now_ns();
}

// Waits until the flag has reached `target` (modulo 2^32). After `timeout_ns`, or when another poll
// of this GPU has failed before, it records what it saw and returns: the call ends, with an error.
__device__ void poll(uint32_t const* flag, uint32_t target, Params const& p, PollCode code,
                     uint32_t index) {
  long long deadline = 0;
  for (uint32_t spin = 0;; ++spin) {
    uint32_t const value = load_acquire(flag);
    if (int32_t(value - target) >= 0) return;
    if (spin % 64 != 63) continue;
    if (deadline == 0) deadline = now_ns() + p.timeout_ns;
    bool const failed_before = *reinterpret_cast<uint32_t volatile*>(&p.error->code) != 0;
    if (!failed_before && now_ns() < deadline) continue;
    if (atomicCAS(&p.error->code, 0u, uint32_t(code)) == 0u) {
      p.error->index = index;
      p.error->target = target;
      p.error->value = value;
    }
    return;
  }
}

struct __align__(8) Barriers {
  uint64_t full[kStages], empty[kStages], d_full[kSlabs], d_empty[kSlabs];
};

// A position in a ring of `kSlots` with the parity that its barriers wait for.
template <int kSlots>
struct Ring {
  int slot = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++slot == kSlots) { slot = 0; phase ^= 1; }
  }
};

// The shape of one layer's tile: math groups stand along m, or along n when m is only 64.
template <int kM_, int kN_>
struct TileShape {
  static constexpr int kM = kM_, kN = kN_;
  static constexpr int kGroupsM = kM >= 128 ? kMathGroups : 1;
  static constexpr int kGroupsN = kMathGroups / kGroupsM;
  static constexpr int kGroupM = kM / kGroupsM;               // rows of one math group
  static constexpr int kGroupN = kN / kGroupsN;
  static constexpr int kSlabsN = kN / kTileK;
  static_assert(kGroupM % 64 == 0 && kGroupN % 64 == 0 && kN % 64 == 0);
};
using Up = TileShape<kUpM, kUpN>;
using Down = TileShape<kDownM, kDownN>;

template <int kN> struct Wgmma;
#define CTATUNE_WGMMA(N)                                                            \
  template <> struct Wgmma<N> {                                                     \
    using Atom = SM90_64x##N##x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>;   \
  };
CTATUNE_WGMMA(64) CTATUNE_WGMMA(128) CTATUNE_WGMMA(192) CTATUNE_WGMMA(256)

// ---------------------------------------------------------------------------------- load warp

struct Loader {
  Params const& p;
  char* ring;
  Barriers& bars;
  uint32_t epoch;
  Ring<kStages> at;

  __device__ void arm(Ring<kStages> const& r, int bytes) {
    Barrier::wait(&bars.empty[r.slot], r.phase ^ 1);
    TransactionBarrier::arrive_and_expect_tx(&bars.full[r.slot], bytes);
  }
  __device__ void load(Ring<kStages> const& r, TensorMap const& map, int offset, int col, int row) {
    SM90_TMA_LOAD_2D::copy(&map, &bars.full[r.slot], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL),
                           ring + r.slot * kStageBytes + offset, col, row);
  }
  __device__ void load_y1(Ring<kStages> const& r, int col, int row) {
    SM90_TMA_LOAD_3D::copy(&p.y1, &bars.full[r.slot], uint64_t(TMA::CacheHintSm90::EVICT_NORMAL),
                           ring + r.slot * kStageBytes, col, row, epoch & 1);
  }

  __device__ void up(int4 tile) {
    for (int kb = 0; kb < p.up_k_blocks; ++kb, at.advance()) {
      arm(at, p.x_box_bytes + kUpN * kRowBytes);
      load(at, p.x, 0, kb * kTileK, tile.y);
      load(at, p.w_up, kABytes, kb * kTileK, tile.z);
    }
  }

  __device__ bool arrived(int panel, int segment) {
    uint32_t const target = (epoch / 2 + 1) * p.segment_tiles[segment];
    return int32_t(load_acquire(panel_flag(p.panels, p, epoch, panel, segment)) - target) >= 0;
  }
  __device__ void await(int panel, int segment) {
    uint32_t const target = (epoch / 2 + 1) * p.segment_tiles[segment];
    poll(panel_flag(p.panels, p, epoch, panel, segment), target, p, kPanelPoll, panel);
  }

  // Loads the K blocks of one segment. While the segment is not here, weights go ahead, but leave a
  // stage: math frees its last one only when it has the next.
  __device__ void down_segment(int4 tile, int segment, bool first, int i) {
    int const begin = tile.y / kUpM;
    int const end = (min(tile.y + kDownM, p.m) - 1) / kUpM + 1;
    int const bytes = p.y1_box_bytes + kDownN * kRowBytes;
    int const first_block = p.segment_block[segment], last = p.segment_block[segment + 1];
    bool ready = true;
    for (int panel = begin; panel < end && !kSkipWait; ++panel) ready &= arrived(panel, segment);
    int ahead = first_block;
    if (!ready) {
      Ring<kStages> r = at;
      for (; ahead < min(first_block + kStages - 1, last); ++ahead, r.advance()) {
        arm(r, bytes);
        load(r, p.w_down, kABytes, ahead * kTileK, tile.z);
      }
      for (int panel = begin; panel < end; ++panel) await(panel, segment);
    }
    if (first) stamp(p, i, kPanelReady);
    fence_async_proxy();                    // the acquire above orders the TMA loads below
    for (int kb = first_block; kb < last; ++kb, at.advance()) {
      if (kb >= ahead) {
        arm(at, bytes);
        load(at, p.w_down, kABytes, kb * kTileK, tile.z);
      }
      load_y1(at, kb * kTileK, tile.y);
    }
  }

  __device__ void down(int4 tile, int i) {
    int segment = tile.x / kSegmentUnit;
    for (int s = 0; s < p.segment_count; ++s) {
      down_segment(tile, segment, s == 0, i);
      if (++segment == p.segment_count) segment = 0;
    }
  }

  __device__ void run() {
    if (p.y1_outs > 0) { prefetch_map(p.x); prefetch_map(p.w_up); }
    if (p.y2_outs > 0) { prefetch_map(p.w_down); prefetch_map(p.y1); }
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      int4 const tile = p.tiles[i];
      stamp(p, i, kLoadStarts);
      if (tile.x % kSegmentUnit == 0) up(tile); else down(tile, i);
    }
  }
};

// --------------------------------------------------------------------------------- store warp

struct Storer {
  Params const& p;
  char* slabs;
  Barriers& bars;
  uint32_t epoch;
  Ring<kSlabs> at, to_free;
  bool y1_open = false, y2_open = false;    // destinations were seen ready for this call

  __device__ void free_slab() {
    Barrier::arrive(&bars.d_empty[to_free.slot]);
    to_free.advance();
  }

  __device__ void open(int outs, int const* gpus, uint32_t target) {
    for (int d = 0; d < outs; ++d)
      poll(p.started + gpus[d] * kLine, target, p, kStartedPoll, gpus[d]);
    fence_async_proxy();
  }

  // Destination 0 is this GPU when it is one at all (launch.py); its copy is done and told first.
  template <bool kIsUp>
  __device__ void issue(int4 tile, int slab, int slot, int first, int last) {
    void const* from = slabs + slot * kSlabBytes;
    int const col = tile.w + slab * kTileK;
    for (int d = first; d < last; ++d) {
      if constexpr (kIsUp) SM90_TMA_STORE_3D::copy(&p.y1_out[d], from, col, tile.y, epoch & 1);
      else SM90_TMA_STORE_2D::copy(&p.y2_out[d], from, col, tile.y);
    }
  }

  // Adds 1 to the panel counter of destinations [first, last). Called when the stores are visible.
  __device__ void tell(int4 tile, int first, int last) {
    fence_async_proxy();
    int const panel = tile.y / kUpM, segment = tile.x / kSegmentUnit;
    for (int d = first; d < last; ++d)
      add_release(panel_flag(p.panels_out[d], p, epoch, panel, segment), 1);
  }

  // Stores one tile, in as many parts as the slabs demand, and tells the receivers of Y1.
  // All SMs finish a tile at about the same time, and stores from all of them at once fill the
  // links and hold up the loads behind them: paced, they start one SM after the other.
  template <class Tile, bool kIsUp>
  __device__ void store(int4 tile, bool last_tile) {
    constexpr int kPart = kSlabs < Tile::kSlabsN ? kSlabs : Tile::kSlabsN;
    int const outs = kIsUp ? p.y1_outs : p.y2_outs;
    int const own = kIsUp ? p.y1_own : p.y2_own;
    bool const paced = p.pace_ns > 0 && !last_tile && own < outs;
    for (int part = 0; part < Tile::kSlabsN; part += kPart) {
      int const end = min(part + kPart, Tile::kSlabsN);
      Ring<kSlabs> r = at;
      for (int s = part; s < end; ++s, r.advance()) {
        Barrier::wait(&bars.d_full[r.slot], r.phase);
        issue<kIsUp>(tile, s, r.slot, 0, own);
      }
      tma_store_arrive();
      if (kIsUp && end == Tile::kSlabsN) {  // before stores to peers: a release waits for those too
        drain();
        tell(tile, 0, own);
      }
      long long next = paced ? now_ns() + blockIdx.x * p.pace_ns / gridDim.x : 0;
      for (int s = part; s < end; ++s, at.advance()) {
        if (paced) {
          while (now_ns() < next) __nanosleep(100);
          next += p.pace_ns;
        }
        issue<kIsUp>(tile, s, at.slot, own, outs);
      }
      tma_store_arrive();
      tma_store_wait<0>();                  // read: the slabs may be written again
      for (int s = part; s < end; ++s) free_slab();
    }
    if constexpr (kIsUp) { drain(); tell(tile, own, outs); }
  }

  // Waits until all stores are visible where they went.
  __device__ void drain() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

  __device__ void run() {
    for (int d = 0; d < p.y1_outs; ++d) prefetch_map(p.y1_out[d]);
    for (int d = 0; d < p.y2_outs; ++d) prefetch_map(p.y2_out[d]);
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      int4 const tile = p.tiles[i];
      bool const last = i + gridDim.x >= p.tile_count;
      Barrier::wait(&bars.d_full[at.slot], at.phase);
      stamp(p, i, kStoreStarts);
      if (tile.x % kSegmentUnit == 0) {
        if (!y1_open) open(p.y1_outs, p.y1_gpu, epoch);
        y1_open = true;
        store<Up, true>(tile, last);
      } else {
        if (!y2_open) open(p.y2_outs, p.y2_gpu, epoch + 1);
        y2_open = true;
        store<Down, false>(tile, last);
      }
      stamp(p, i, kStored);
    }
    // A CTA without a tile of `down` must not count for a call that the receiver has not begun.
    if (!y2_open && p.arrived_outs > 0) open(p.y2_outs, p.y2_gpu, epoch + 1);
    drain();
    fence_async_proxy();
    for (int d = 0; d < p.arrived_outs; ++d) add_release(p.arrived_out[d], 1);
    if (blockIdx.x == 0 && p.arrivals > 0)  // what peers send to this GPU has arrived too
      poll(p.arrived, (epoch + 1) * p.arrivals, p, kArrivedPoll, 0);
  }
};

// --------------------------------------------------------------------------------- math groups

// Writes the slabs of one math group, each a (tile m) x 64 box in the 128-byte swizzle.
template <class Tile, class Acc>
__device__ void write_slabs(Acc const& acc, char* slabs, Barriers& bars, Ring<kSlabs>& at,
                            int group) {
  constexpr int kSlabsGroup = Tile::kGroupN / kTileK;
  constexpr int kRepeatM = Tile::kGroupM / 64;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int const row0 = (Tile::kGroupsM > 1 ? group * 64 : 0) + warp * 16 + lane % 16;
  int const first = Tile::kGroupsN > 1 ? group * kSlabsGroup : 0;
  for (int s = 0; s < first; ++s) at.advance();
  CUTLASS_PRAGMA_UNROLL
  for (int s = 0; s < kSlabsGroup; ++s, at.advance()) {
    Barrier::wait(&bars.d_empty[at.slot], at.phase ^ 1);
    char* slab = slabs + at.slot * kSlabBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRepeatM; ++r) {
      int const row = row0 + r * 64 * Tile::kGroupsM;
      CUTLASS_PRAGMA_UNROLL
      for (int pair = 0; pair < 4; ++pair) {          // 16 columns: two 16-byte chunks of the row
        uint32_t regs[4];
        CUTLASS_PRAGMA_UNROLL
        for (int q = 0; q < 4; ++q) {
          int const block = s * 8 + pair * 2 + q / 2; // of 8 columns
          float const lo = acc(make_coord(0, q % 2, block), r, 0);
          float const hi = acc(make_coord(1, q % 2, block), r, 0);
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(regs[q]) : "f"(hi), "f"(lo));
        }
        int const chunk = (pair * 2 + lane / 16) ^ (row % 8);
        SM90_U32x4_STSM_N::copy(regs[0], regs[1], regs[2], regs[3],
                                *reinterpret_cast<uint128_t*>(slab + row * kRowBytes + chunk * 16));
      }
    }
    tma_store_fence();                                // generic writes before the async reads
    cutlass::arch::NamedBarrier::sync(128, 1 + group);
    if (threadIdx.x % 128 == 0)                       // two arrivals complete a slab
      for (int i = 0; i < Tile::kGroupsN; ++i) Barrier::arrive(&bars.d_full[at.slot]);
  }
  for (int s = first + kSlabsGroup; s < Tile::kSlabsN; ++s) at.advance();
}

template <class Tile>
__device__ void math_tile(Params const& p, int tile, char* ring, char* slabs, Barriers& bars,
                          Ring<kStages>& at, Ring<kSlabs>& d_at, int k_blocks, int group) {
  bool const stamps = threadIdx.x == 128;
  if (stamps) stamp(p, tile, kMathWaits);
  Barrier::wait(&bars.full[at.slot], at.phase);
  if (stamps) stamp(p, tile, kMathStarts);
  using Atom = typename Wgmma<Tile::kGroupN>::Atom;
  auto mma = make_tiled_mma(Atom{}, Layout<Shape<Int<Tile::kGroupsM>, Int<Tile::kGroupsN>, _1>>{});
  auto layout_a = tile_to_shape(GMMA::Layout_K_SW128_Atom<bf16>{}, Shape<Int<Tile::kM>, Int<kTileK>>{});
  auto layout_b = tile_to_shape(GMMA::Layout_K_SW128_Atom<bf16>{}, Shape<Int<Tile::kN>, Int<kTileK>>{});
  auto thread = mma.get_slice(threadIdx.x - 128);
  // Descriptors of stage 0 (m or n, k): a stage further is kStageBytes further.
  auto frag_a = thread.make_fragment_A(thread.partition_A(
      make_tensor(make_smem_ptr(reinterpret_cast<bf16*>(ring)), layout_a)));
  auto frag_b = thread.make_fragment_B(thread.partition_B(
      make_tensor(make_smem_ptr(reinterpret_cast<bf16*>(ring + kABytes)), layout_b)));
  auto acc = partition_fragment_C(mma, Shape<Int<Tile::kM>, Int<Tile::kN>>{});

  mma.accumulate_ = GMMA::ScaleOut::Zero;
  int previous = -1;
  for (int kb = 0; kb < k_blocks; ++kb, at.advance()) {
    Barrier::wait(&bars.full[at.slot], at.phase);
    int const offset = at.slot * (kStageBytes / 16);
    auto a = make_tensor(frag_a.data() + offset, frag_a.layout());
    auto b = make_tensor(frag_b.data() + offset, frag_b.layout());
    warpgroup_fence_operand(acc);
    warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < kTileK / 16; ++k) {
      gemm(mma, a(_, _, k), b(_, _, k), acc);
      mma.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    warpgroup_fence_operand(acc);
    warpgroup_wait<1>();
    if (previous >= 0 && threadIdx.x % 128 == 0) Barrier::arrive(&bars.empty[previous]);
    previous = at.slot;
  }
  warpgroup_wait<0>();
  warpgroup_fence_operand(acc);
  if (threadIdx.x % 128 == 0) Barrier::arrive(&bars.empty[previous]);
  if (stamps) stamp(p, tile, kMathEnds);
  write_slabs<Tile>(acc, slabs, bars, d_at, group);
  if (stamps) stamp(p, tile, kSlabsWritten);
}

// -------------------------------------------------------------------------------------- kernel

extern "C" __global__ __launch_bounds__(kThreads, 1)
void mlp(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char smem[];
  char* ring = smem;
  char* slabs = smem + kStages * kStageBytes;
  Barriers& bars = *reinterpret_cast<Barriers*>(slabs + kSlabs * kSlabBytes);
  int const warp = threadIdx.x / 32;
  uint32_t const epoch = p.calls[0];        // the last CTA to leave moves it on

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      Barrier::init(&bars.full[i], 1);
      Barrier::init(&bars.empty[i], kMathGroups);
    }
    for (int i = 0; i < kSlabs; ++i) {
      Barrier::init(&bars.d_full[i], 2);
      Barrier::init(&bars.d_empty[i], 1);
    }
    cutlass::arch::fence_barrier_init();
    if (blockIdx.x == 0)
      for (int d = 0; d < p.peers; ++d) add_release(p.started_out[d], 1);
  }
  __syncthreads();

  if (warp < 4) {
    cutlass::arch::warpgroup_reg_dealloc<40>();
    if (warp == 0 && elect_one_sync()) Loader{p, ring, bars, epoch}.run();
    if (warp == 1 && elect_one_sync()) Storer{p, slabs, bars, epoch}.run();
  } else {
    cutlass::arch::warpgroup_reg_alloc<232>();
    int const group = warp / 4 - 1;
    Ring<kStages> at;
    Ring<kSlabs> d_at;
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      if (p.tiles[i].x % kSegmentUnit == 0)
        math_tile<Up>(p, i, ring, slabs, bars, at, d_at, p.up_k_blocks, group);
      else
        math_tile<Down>(p, i, ring, slabs, bars, at, d_at, p.down_k_blocks, group);
    }
  }

  __syncthreads();
  if (threadIdx.x == 0) {
    if (atomicAdd(&p.calls[kLine], 1u) + 1 == gridDim.x) {
      p.calls[kLine] = 0;                   // of this GPU alone: the next call starts after us
      p.calls[0] = epoch + 1;
    }
  }
}
