// A CTA-pipelined MLP for sm_90a: Y1 = X W_up^T, Y2 = Y1 W_down^T, bf16 in and out, fp32 sums.
//
// Persistent CTAs, one an SM at most, walk this GPU's tile list: first tiles of `up`, whose results
// are stored into the Y1 of every GPU that needs them, then tiles of `down`. A `down` tile sums over
// Y1 segment by segment, beginning with its own GPU's, and waits for each as it comes to it, so that
// transfers hide behind sums. The list is data (ctatune/schedule.py).
//
// With kReduce (`down` divided along h) Y1 stays where it was computed. A GPU sums each tile of Y2
// over its own segment: those that other GPUs own first, as `partial` tiles in bf16, which go into
// columns of the owner's Y1 behind its segments; then its own, to which it adds the partial sums of
// its peers as more K blocks: their columns times a matrix with ones on the diagonal.
//
//   warp              role         waits for                        signals
//   0                 load         empty[stage], panel counters     full[stage] (TMA bytes)
//   1                 store        d_full[slot], started, arrived   d_empty[slot], panels, arrived
//   4..11 (groups)    math         full[stage], d_empty[slot],      empty[stage], d_full[slot],
//                                  sums_full, sums_free             both of its cluster's CTAs
//
// In each layer a cluster serves one of two ends. Split-K: its CTAs have the same tile and each sums
// a part of K; a CTA then owns some of the tile's rows, gets the partial sums of these from the
// others, and stores them. Multicast: its two CTAs have tiles one above the other; each loads half
// of the weights that both need, for both.
//
// With kDirect, math groups store results from registers, own GPU's first, and the store warp only
// tells: d_full then counts tiles stored to this GPU and to peers in turn. Less latency for few tokens.
//
// Flags that GPUs share only grow; each stands on its own 128-byte line of the GPU that polls it:
//   panels[2][panels][segments]  tiles that arrived here, by parity of the call; a segment is the
//                      part of Y1's columns that one GPU computes; with kReduce followed by the
//                      partial sums of each
//   started[gpu]       calls that this peer has started
//   arrived            CTAs of peers that have delivered all their Y2 tiles here
// A GPU in call e stores Y1 into a peer that has started call e - 1: that peer has finished e - 2,
// the last reader of the same parity. It stores Y2 into a peer that has started call e: whatever
// read the Y2 of call e - 1 on that peer's stream is done.
//
// With kSwap, weights are the first operand of WGMMA and tokens the second: a tile then has any
// multiple of 8 rows from 64 to 256, and each math group 64 of its columns. A thread has sums of all
// rows, so with split-K every math warp sends some of its sums and gets others.
//
// Defined before this text (ctatune/jit.py): kUpM kUpN kUpSplit kDownM kDownN kDownSplit kStages
// kSlabs kMulticast kDirect kReduce kSwap kSkipWait.

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
constexpr uint64_t kKeep = uint64_t(TMA::CacheHintSm90::EVICT_NORMAL);
constexpr int kTileK = 64;                  // 128 bytes of bf16: one row of the 128-byte swizzle
constexpr int kRowBytes = 128;
constexpr int kLine = 32;                   // uint32 in the 128-byte line of one flag
constexpr int kSegmentUnit = 256;           // in the first word of a tile, above the layer
constexpr int kReceiverUnit = 65536;        // above the segment
constexpr int kUpTile = 0, kDownTile = 1, kPartialTile = 2;
constexpr int kNoTile = 3;                  // keeps clusters together
constexpr bool kSmall = kUpM <= 64 && kUpN == 64 && kDownM <= 64 && kDownN == 64;
constexpr int kMathGroups = kSwap ? kUpN / 64 : kSmall ? 1 : 2;
constexpr int kThreads = 128 * (1 + kMathGroups);
constexpr int kMaxSplit = kUpSplit > kDownSplit ? kUpSplit : kDownSplit;
constexpr int kCluster = kMulticast ? 2 : kMaxSplit;

constexpr int max_of(int a, int b) { return a > b ? a : b; }

// The tile of one layer in shared memory and registers. Math groups stand along m, or along n when
// a tile has no more than 64 rows. WGMMA computes 64 rows at least; of fewer (`kRows`) the rest of
// its A lies in what follows in the stage, and what it computes from that is never stored.
template <int kRows_, int kN_, int kSplit_>
struct TileShape {
  static constexpr int kRows = kRows_, kN = kN_, kSplit = kSplit_;
  static constexpr bool kPairs = kMulticast && kSplit == 1;   // of CTAs that load weights together
  static constexpr int kM = kSwap ? kRows : max_of(64, kRows);
  static constexpr int kGroupsM = kM >= 128 && !kSwap ? kMathGroups : 1;
  static constexpr int kGroupsN = kMathGroups / kGroupsM;
  static constexpr int kGroupM = kM / kGroupsM;               // rows of one math group
  static constexpr int kGroupN = kN / kGroupsN;
  static constexpr int kSlabN = kN % kTileK ? kTileK / 2 : kTileK;  // columns of a slab
  static constexpr int kSlabsN = kN / kSlabN;
  static constexpr int kSlabRowBytes = 2 * kSlabN;
  static constexpr int kOutRows = kM / kSplit;                // that one CTA of a cluster stores
  static constexpr int kABytes = kRows * kRowBytes;
  static constexpr int kStageBytes = kABytes + kN * kRowBytes;
  static constexpr int kSlabBytes = kDirect ? 0 : kOutRows * kSlabRowBytes;
  static constexpr int kOwnerWarps = 4 * kMathGroups / kSplit; // math warps whose rows one CTA owns
  static constexpr int kSums = kGroupM * kGroupN / 128;       // accumulators of one thread
  static constexpr int kSenderBytes = kOutRows * kN * 4;
  static constexpr int kExchangeBytes = (kSplit - 1) * kSenderBytes;
  static_assert(kSwap ? kOutRows % 8 == 0 && kGroupN == 64 && !kDirect
                      : kGroupM % 64 == 0 && kGroupN % (kGroupsN > 1 ? kTileK : kSlabN) == 0);
  static_assert(kSplit == 1 || (kSplit == kMaxSplit && (kSwap || kM <= 128) && kSplit <= 4));
};
using Up = TileShape<kUpM, kUpN, kUpSplit>;
using Down = TileShape<kDownM, kDownN, kDownSplit>;
// Partial sums lie in Y1: in the boxes in which `up` stores, and as whole K blocks.
static_assert(!kReduce || (Up::kSlabN == kTileK && Down::kSlabN == kTileK));

// Layers with equal tiles share one ring of stages; otherwise `down` divides the same memory anew.
constexpr bool kOneRing = kUpM == kDownM && kUpN == kDownN && Up::kPairs == Down::kPairs;
constexpr int kRingBytes = kStages * Up::kStageBytes;
constexpr int kDownStages = kRingBytes / Down::kStageBytes;
constexpr int kMaxStages = max_of(kStages, kDownStages);
constexpr int kSlabBytes = max_of(Up::kSlabBytes, Down::kSlabBytes);
constexpr int kExchangeBytes = max_of(Up::kExchangeBytes, Down::kExchangeBytes);

struct alignas(128) TensorMap { char opaque[128]; };

// What a poll found when its time ran out; `code` 0 means that nothing went wrong.
struct PollError { uint32_t code, index, target, value; };
enum PollCode : uint32_t { kPanelPoll = 1, kStartedPoll = 2, kArrivedPoll = 3, kBarrierPoll = 4 };

// Mirrored by ctatune/abi.py. Pointers `*_out` lead into the memory of peers (or our own).
struct Params {
  TensorMap x[2], y1[2];                    // in boxes of the rows of a tile, and of the rows that
                                            // the last one has: a box that sticks out is slow
  TensorMap w_up, w_down, ones;             // ones: on the diagonal, as wide as a `down` tile
  TensorMap y1_out[kMaxGpus], y2_out[kMaxGpus];
  bf16 *y1_to[kMaxGpus], *y2_to[kMaxGpus];  // the same places, for stores from registers
  uint32_t* panels_out[kMaxGpus];
  uint32_t* arrived_out[kMaxGpus];
  uint32_t* started_out[kMaxGpus];
  uint32_t* panels;
  uint32_t* started;
  uint32_t* arrived;
  uint32_t* calls;                          // [0, 1]: finished calls, the low half first; [kLine]:
                                            // CTAs that left this one
  PollError* error;
  int4 const* tiles;                        // {layer + 256 segment + 65536 place of the receiver of
                                            // partial sums in y1_out, row, row in weight, column}
  long long* stamps;                        // null, or kStamps times a tile
  long long timeout_ns;
  int tile_count, m, h, n, up_k_blocks;     // h: columns of the memory of Y1, partial sums included
  int x_box_bytes[2], y1_box_bytes[2];
  int panel_count, segment_count, arrivals, pace_ns;
  int y1_parity;                            // 1: Y1 has a plane for each parity of the call
  int segment_tiles[2 * kMaxGpus];          // of one panel, times the CTAs that store each
  int segment_block[kMaxGpus + 1];          // first K block of `down` in each segment, and the end
  int y1_outs, y2_outs, arrived_outs, peers;
  int y1_own, y2_own;                       // 1 when destination 0 is this GPU, else 0
  int flag_segments;                        // of a panel: segments and, with kReduce, partial sums
  int w_down_column;                        // of Y1 that the first column of w_down here belongs to
  int partial_column[kMaxGpus];             // where column 0 of Y2 would lie in Y1 of y1_out
  int partial_width;                        // columns from the partial sums of one GPU to the next
  int y1_gpu[kMaxGpus], y2_gpu[kMaxGpus];
};

__device__ uint32_t load_acquire(uint32_t const* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Adds to several flags of peers: what was done before is visible to whoever sees one of them.
__device__ void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
__device__ void add_relaxed(uint32_t* flag, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// For a flag of this GPU that only this GPU's threads poll.
__device__ void add_release_here(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ void fence_async_proxy() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ void prefetch_map(TensorMap const& map) {
  prefetch_tma_descriptor(reinterpret_cast<TmaDescriptor const*>(&map));
}
__device__ void prefetch_maps(TensorMap const (&maps)[2]) {
  for (TensorMap const& map : maps) prefetch_map(map);
}

__device__ uint32_t* panel_flag(uint32_t* panels, Params const& p, uint32_t epoch, int panel,
                                int segment) {
  return panels + (((epoch & 1) * p.panel_count + panel) * p.flag_segments + segment) * kLine;
}

__device__ int layer_of(int4 tile) { return tile.x % kSegmentUnit; }
__device__ int segment_of(int4 tile) { return tile.x % kReceiverUnit / kSegmentUnit; }
__device__ bool is_partial(int4 tile) { return kReduce && layer_of(tile) == kPartialTile; }

// Places in y1_out or y2_out of those who get a tile: [begin, own) this GPU, [own, end) peers.
struct Receivers { int begin, own, end; };
template <bool kIsUp>
__device__ Receivers receivers_of(Params const& p, int4 tile) {
  if constexpr (kIsUp) return {0, p.y1_own, p.y1_outs};
  if (!is_partial(tile)) return {0, p.y2_own, p.y2_outs};
  int const place = tile.x / kReceiverUnit;
  return {place, max(place, p.y1_own), place + 1};
}

// The column of Y1 of y1_out[place] where a tile's partial sums lie.
__device__ int partial_column(Params const& p, int4 tile, int segment, int place) {
  return p.partial_column[place] + segment * p.partial_width + tile.w;
}

// What the kernel before this one in the stream did is visible from here on. Only weights are read,
// and nothing is written, before it (kernel.py starts this kernel while that one ends).
__device__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

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
  uint64_t full[kOneRing ? 1 : 2][kMaxStages], empty[kOneRing ? 1 : 2][kMaxStages];
  uint64_t d_full[kSlabs], d_empty[kSlabs];
  uint64_t sums_full, sums_free;            // partial sums of others are here, were read by others
  uint64_t open[2];                         // with kDirect: receivers of Y1, of Y2 are ready
  uint64_t drained;                         // `up` has left the stages of both CTAs of a pair
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

// The position in the ring of stages that each layer uses.
struct Rings {
  Ring<kStages> up;
  Ring<kOneRing ? 1 : kDownStages> down;    // the same ring as `up` when tiles are equal
  template <bool kIsUp>
  __device__ auto& at() {
    if constexpr (kIsUp || kOneRing) return up; else return down;
  }
};
template <bool kIsUp> constexpr int kRing = kIsUp || kOneRing ? 0 : 1;
template <bool kIsUp> using Layer = cute::conditional_t<kIsUp, Up, Down>;
template <bool kIsUp> using StageRing = Ring<kIsUp || kOneRing ? kStages : kDownStages>;

// The K blocks [begin, end) of one segment that CTA `part` of the tile sums.
struct Blocks { int begin, end; };
__device__ Blocks part_of(int begin, int end, int part, int parts) {
  int const count = end - begin;
  return {begin + count * part / parts, begin + count * (part + 1) / parts};
}

template <int kN> struct Wgmma;
#define CTATUNE_WGMMA(N)                                                            \
  template <> struct Wgmma<N> {                                                     \
    using Atom = SM90_64x##N##x16_F32BF16BF16_SS<GMMA::Major::K, GMMA::Major::K>;   \
  };
CTATUNE_WGMMA(64) CTATUNE_WGMMA(96) CTATUNE_WGMMA(128) CTATUNE_WGMMA(192) CTATUNE_WGMMA(256)
#ifdef CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // where a tile needs it: three megabytes of headers
CTATUNE_WGMMA(72) CTATUNE_WGMMA(80) CTATUNE_WGMMA(88) CTATUNE_WGMMA(104) CTATUNE_WGMMA(112)
CTATUNE_WGMMA(120) CTATUNE_WGMMA(136) CTATUNE_WGMMA(144) CTATUNE_WGMMA(152) CTATUNE_WGMMA(160)
CTATUNE_WGMMA(168) CTATUNE_WGMMA(176) CTATUNE_WGMMA(184) CTATUNE_WGMMA(200) CTATUNE_WGMMA(208)
CTATUNE_WGMMA(216) CTATUNE_WGMMA(224) CTATUNE_WGMMA(232) CTATUNE_WGMMA(240) CTATUNE_WGMMA(248)
#endif

// ---------------------------------------------------------------------------------- load warp

struct Loader {
  Params const& p;
  char* ring;
  Barriers& bars;
  Rings rings;
  uint32_t epoch = 0, turn = 0;             // turn: calls of this parity, with this one
  bool started = false;                     // may read what the kernel before this one made
  bool drained = kOneRing;

  __device__ void start() {
    wait_for_previous();
    epoch = p.calls[0];
    turn = epoch / 2 + (p.calls[1] << 31) + 1;
    started = true;
  }

  // In which of two boxes a tile loads rows of A.
  template <bool kIsUp>
  __device__ int box_of(int4 tile) { return tile.y + Layer<kIsUp>::kRows > p.m; }

  template <bool kIsUp>
  __device__ void arm(StageRing<kIsUp> const& r, int bytes) {
    Barrier::wait(&bars.empty[kRing<kIsUp>][r.slot], r.phase ^ 1);
    TransactionBarrier::arrive_and_expect_tx(&bars.full[kRing<kIsUp>][r.slot], bytes);
  }

  template <bool kIsUp>
  __device__ char* stage(StageRing<kIsUp> const& r) {
    return ring + r.slot * Layer<kIsUp>::kStageBytes;
  }

  // What a tile sums of one segment: from column `a` of X or Y1 on, times rows of `weights` from
  // column `b` on; both are those of K block 0. `flag` says that A is here.
  struct Run { TensorMap const* weights; int row, a, b, flag; Blocks blocks; };

  // A CTA of a multicast pair loads its half of the weights for both.
  template <bool kIsUp>
  __device__ void load_weights(StageRing<kIsUp> const& r, Run const& run, int kb) {
    using Tile = Layer<kIsUp>;
    uint64_t* full = &bars.full[kRing<kIsUp>][r.slot];
    char* to = stage<kIsUp>(r) + Tile::kABytes;
    if constexpr (Tile::kPairs) {
      int const half = block_rank_in_cluster() * (Tile::kN / 2);
      SM90_TMA_LOAD_MULTICAST_2D::copy(run.weights, full, uint16_t(3), kKeep,
                                       to + half * kRowBytes, run.b + kb * kTileK, run.row + half);
    } else {
      SM90_TMA_LOAD_2D::copy(run.weights, full, kKeep, to, run.b + kb * kTileK, run.row);
    }
  }

  // Loads weights into all stages but one, which math may need to free its last one: it does that
  // only when it has the next. Returns the first K block that has none.
  template <bool kIsUp>
  __device__ int weights_ahead(StageRing<kIsUp> r, Run const& run, int bytes) {
    int const most = (kIsUp || kOneRing ? kStages : kDownStages) - 1;
    int const end = min(run.blocks.begin + most, run.blocks.end);
    for (int kb = run.blocks.begin; kb < end; ++kb, r.advance()) {
      arm<kIsUp>(r, bytes);
      load_weights<kIsUp>(r, run, kb);
    }
    return end;
  }

  __device__ void up(int4 tile, int part) {
    auto& at = rings.at<true>();
    Run const run = {&p.w_up, tile.z, 0, 0, 0, part_of(0, p.up_k_blocks, part, kUpSplit)};
    int const box = box_of<true>(tile);
    int const bytes = p.x_box_bytes[box] + kUpN * kRowBytes;
    int ahead = run.blocks.begin;
    if (!started) {
      ahead = weights_ahead<true>(at, run, bytes);
      start();
    }
    for (int kb = run.blocks.begin; kb < run.blocks.end; ++kb, at.advance()) {
      if (kb >= ahead) {
        arm<true>(at, bytes);
        load_weights<true>(at, run, kb);
      }
      SM90_TMA_LOAD_2D::copy(&p.x[box], &bars.full[0][at.slot], kKeep, stage<true>(at), kb * kTileK,
                             tile.y);
    }
  }

  __device__ bool arrived(int panel, int segment) {
    uint32_t const target = turn * p.segment_tiles[segment];
    return int32_t(load_acquire(panel_flag(p.panels, p, epoch, panel, segment)) - target) >= 0;
  }
  __device__ void await(int panel, int segment) {
    uint32_t const target = turn * p.segment_tiles[segment];
    poll(panel_flag(p.panels, p, epoch, panel, segment), target, p, kPanelPoll, panel);
  }

  // Loads the K blocks of a run: of a segment, or of what a peer summed. While they are not here,
  // weights go ahead.
  __device__ void down_run(int4 tile, Run const& run, bool first, int i) {
    if (!first && run.blocks.begin == run.blocks.end) return;  // another part sums all of it
    auto& at = rings.at<false>();
    int const begin = tile.y / kUpM;
    int const end = (min(tile.y + kDownM, p.m) - 1) / kUpM + 1;
    int const box = box_of<false>(tile);
    int const bytes = p.y1_box_bytes[box] + kDownN * kRowBytes;
    bool ready = true;
    for (int panel = begin; panel < end && !kSkipWait; ++panel) ready &= arrived(panel, run.flag);
    int ahead = run.blocks.begin;
    if (!ready) {
      ahead = weights_ahead<false>(at, run, bytes);
      for (int panel = begin; panel < end; ++panel) await(panel, run.flag);
    }
    if (first) stamp(p, i, kPanelReady);
    fence_async_proxy();                    // the acquire above orders the TMA loads below
    for (int kb = run.blocks.begin; kb < run.blocks.end; ++kb, at.advance()) {
      if (kb >= ahead) {
        arm<false>(at, bytes);
        load_weights<false>(at, run, kb);
      }
      SM90_TMA_LOAD_3D::copy(&p.y1[box], &bars.full[kRing<false>][at.slot], kKeep, stage<false>(at),
                             run.a + kb * kTileK, tile.y, epoch & p.y1_parity);
    }
  }

  __device__ void down(int4 tile, int part, int i) {
    if (!started) start();
    if (!drained) drain();
    int segment = segment_of(tile);
    for (int s = 0; s < p.segment_count; ++s) {
      if (kReduce && s > 0) {
        if (is_partial(tile)) break;
        int const a = partial_column(p, tile, segment, 0);
        Blocks const blocks = part_of(0, kDownN / kTileK, part, kDownSplit);
        down_run(tile, {&p.ones, 0, a, 0, p.segment_count + segment, blocks}, false, i);
      } else {
        Blocks const blocks =
            part_of(p.segment_block[segment], p.segment_block[segment + 1], part, kDownSplit);
        down_run(tile, {&p.w_down, tile.z, 0, -p.w_down_column, segment, blocks}, s == 0, i);
      }
      if (++segment == p.segment_count) segment = 0;
    }
  }

  // Waits until `up` has left the memory that `down` divides in another way, and that of the other
  // CTA where `down` begins to load for both.
  __device__ void drain() {
    auto r = rings.up;
    for (int i = 0; i < kStages; ++i, r.advance())
      Barrier::wait(&bars.empty[0][r.slot], r.phase ^ 1);
    if constexpr (Down::kPairs && !Up::kPairs) {
      for (int cta = 0; cta < 2; ++cta) Barrier::arrive(&bars.drained, cta, 1);
      Barrier::wait(&bars.drained, 0);
    }
    drained = true;
  }

  __device__ void run() {
    if (p.y1_outs > 0) { prefetch_maps(p.x); prefetch_map(p.w_up); }
    if (kReduce || p.y2_outs > 0) { prefetch_map(p.w_down); prefetch_maps(p.y1); }
    if constexpr (kReduce) prefetch_map(p.ones);
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      int4 const tile = p.tiles[i];
      stamp(p, i, kLoadStarts);
      int const layer = layer_of(tile);
      if (layer == kUpTile) up(tile, i % kUpSplit);
      else if (layer < kNoTile) down(tile, i % kDownSplit, i);
    }
  }
};

// --------------------------------------------------------------------------------- store warp

struct Storer {
  Params const& p;
  char* slabs;
  Barriers& bars;
  Ring<kSlabs> at, to_free;
  uint32_t epoch = 0;
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
  __device__ void issue(int4 tile, int part, int slab, int slot, int first, int last) {
    using Tile = Layer<kIsUp>;
    int const row = part * Tile::kOutRows;  // of the tile, the first that this CTA owns
    if (row >= Tile::kRows || tile.y + row >= p.m) return;
    void const* from = slabs + slot * kSlabBytes;
    bool const partial = is_partial(tile);
    for (int d = first; d < last; ++d) {
      int const in_y1 = partial ? partial_column(p, tile, segment_of(tile), d) : tile.w;
      int const col = in_y1 + slab * Tile::kSlabN;
      if (kIsUp || partial)
        SM90_TMA_STORE_3D::copy(&p.y1_out[d], from, col, tile.y + row, epoch & 1);
      else
        SM90_TMA_STORE_2D::copy(&p.y2_out[d], from, col, tile.y + row);
    }
  }

  // Adds 1 to the panel counter of destinations [first, last). Called when the stores are visible.
  __device__ void tell(int4 tile, int first, int last) {
    fence_async_proxy();
    int const panel = tile.y / kUpM;
    int const segment = segment_of(tile) + (is_partial(tile) ? p.segment_count : 0);
    bool const here = last <= p.y1_own;
    if (!here && first < last) fence_system();
    for (int d = first; d < last; ++d) {
      uint32_t* flag = panel_flag(p.panels_out[d], p, epoch, panel, segment);
      if (here) add_release_here(flag, 1); else add_relaxed(flag, 1);
    }
  }

  // The math groups have stored a tile to this GPU, then to peers: tells the receivers of Y1.
  template <bool kIsUp>
  __device__ void tell_stored(int4 tile) {
    Receivers const to = receivers_of<kIsUp>(p, tile);
    for (int peers = 0; peers < 2; ++peers, at.advance()) {
      Barrier::wait(&bars.d_full[at.slot], at.phase);
      free_slab();
      if (kIsUp || is_partial(tile)) tell(tile, peers ? to.own : to.begin, peers ? to.end : to.own);
    }
  }

  // Stores one tile, in as many parts as the slabs demand, and tells the receivers of Y1.
  // All SMs finish a tile at about the same time, and stores from all of them at once fill the
  // links and hold up the loads behind them: paced, they start one SM after the other.
  template <bool kIsUp>
  __device__ void store(int4 tile, int part, bool last_tile) {
    using Tile = Layer<kIsUp>;
    constexpr int kBatch = kSlabs < Tile::kSlabsN ? kSlabs : Tile::kSlabsN;
    constexpr int kParts = kTileK / Tile::kSlabN;       // slabs of 64 columns, for the pace
    Receivers const to = receivers_of<kIsUp>(p, tile);
    bool const tells = kIsUp || is_partial(tile);
    bool const paced = p.pace_ns > 0 && !last_tile && to.own < to.end;
    for (int begin = 0; begin < Tile::kSlabsN; begin += kBatch) {
      int const end = min(begin + kBatch, Tile::kSlabsN);
      Ring<kSlabs> r = at;
      for (int s = begin; s < end; ++s, r.advance()) {
        Barrier::wait(&bars.d_full[r.slot], r.phase);
        issue<kIsUp>(tile, part, s, r.slot, to.begin, to.own);
      }
      tma_store_arrive();
      // Before stores to peers: a release waits for those too.
      if (tells && to.begin < to.own && end == Tile::kSlabsN) {
        drain();
        tell(tile, to.begin, to.own);
      }
      long long next = paced ? now_ns() + blockIdx.x * (p.pace_ns / kParts) / gridDim.x : 0;
      for (int s = begin; s < end; ++s, at.advance()) {
        if (paced) {
          while (now_ns() < next) __nanosleep(100);
          next += p.pace_ns / kParts;
        }
        issue<kIsUp>(tile, part, s, at.slot, to.own, to.end);
      }
      tma_store_arrive();
      tma_store_wait<0>();                  // read: the slabs may be written again
      for (int s = begin; s < end; ++s) free_slab();
    }
    if (tells) { drain(); tell(tile, to.own, to.end); }
  }

  // Waits until all stores are visible where they went.
  __device__ void drain() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

  __device__ void run() {
    wait_for_previous();
    epoch = p.calls[0];
    if (blockIdx.x == 0) {
      fence_system();
      for (int d = 0; d < p.peers; ++d) add_relaxed(p.started_out[d], 1);
    }
    int const y1_gpus = kReduce ? p.peers : p.y1_outs;
    for (int d = 0; d < y1_gpus; ++d) prefetch_map(p.y1_out[d]);
    for (int d = 0; d < p.y2_outs; ++d) prefetch_map(p.y2_out[d]);
    if constexpr (kDirect) {
      open(y1_gpus, p.y1_gpu, epoch);
      Barrier::arrive(&bars.open[0]);
      open(p.y2_outs, p.y2_gpu, epoch + 1);
      Barrier::arrive(&bars.open[1]);
      y1_open = y2_open = true;
    }
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      int4 const tile = p.tiles[i];
      int const layer = layer_of(tile);
      if (layer == kNoTile) continue;
      bool const last = i + gridDim.x >= p.tile_count;
      Barrier::wait(&bars.d_full[at.slot], at.phase);
      stamp(p, i, kStoreStarts);
      if constexpr (!kDirect) {
        if (layer == kDownTile) {
          if (!y2_open) open(p.y2_outs, p.y2_gpu, epoch + 1);
          y2_open = true;
        } else {
          if (!y1_open) open(y1_gpus, p.y1_gpu, epoch);
          y1_open = true;
        }
      }
      if (layer == kUpTile) {
        if constexpr (kDirect) tell_stored<true>(tile);
        else store<true>(tile, i % kUpSplit, last);
      } else {
        if constexpr (kDirect) tell_stored<false>(tile);
        else store<false>(tile, i % kDownSplit, last);
      }
      stamp(p, i, kStored);
    }
    // A CTA without a tile of `down` must not count for a call that the receiver has not begun.
    if (!y2_open && p.arrived_outs > 0) open(p.y2_outs, p.y2_gpu, epoch + 1);
    drain();
    fence_async_proxy();
    if (p.arrived_outs > 0) fence_system();
    for (int d = 0; d < p.arrived_outs; ++d) add_relaxed(p.arrived_out[d], 1);
    if (blockIdx.x == 0 && p.arrivals > 0)  // what peers send to this GPU has arrived too
      poll(p.arrived, (epoch + 1) * p.arrivals, p, kArrivedPoll, 0);
  }
};

// --------------------------------------------------------------------------------- math groups

// Which CTA of a split-K cluster owns the rows of this math warp, and the warp's place among those
// that it owns.
struct Owner { int part, place; };
template <class Tile>
__device__ Owner owner_of(int group, int warp) {
  if constexpr (Tile::kGroupsM > 1) {
    int const at = group * 4 + warp;
    return {at / Tile::kOwnerWarps, at % Tile::kOwnerWarps};
  } else {
    constexpr int kOwn = 4 / Tile::kSplit;
    return {warp / kOwn, group * kOwn + warp % kOwn};
  }
}

__device__ void send(uint32_t to, uint32_t barrier, float a, float b, float c, float d) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
      ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// Adds to the first `kCount` sums of a thread those that the other CTAs of its cluster have sent, in
// the order of their parts.
template <class Tile, int kCount, class Acc>
__device__ void add_sent(Acc& acc, char const* exchange, int offset) {
  for (int sender = 0; sender < Tile::kSplit - 1; ++sender) {
    float4 const* sums =
        reinterpret_cast<float4 const*>(exchange + sender * Tile::kSenderBytes + offset);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount / 4; ++i) {
      float4 const sum = sums[i * 32];
      acc(4 * i) += sum.x;
      acc(4 * i + 1) += sum.y;
      acc(4 * i + 2) += sum.z;
      acc(4 * i + 3) += sum.w;
    }
  }
}

// Adds up the partial sums of a split-K tile: each math warp sends its sums to the CTA that owns
// its rows, or gets those of the others and adds them to its own in the order of their parts.
template <class Tile, class Acc>
__device__ void reduce(Acc& acc, char* exchange, Barriers& bars, int part, int tiles_before,
                       int group) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  Owner const owner = owner_of<Tile>(group, warp);
  int const first_rank = block_rank_in_cluster() / Tile::kSplit * Tile::kSplit;
  int const offset = (owner.place * (Tile::kSums / 4) * 32 + lane) * 16;
  if (owner.part != part) {
    Barrier::wait(&bars.sums_free, (tiles_before & 1) ^ 1);
    int const sender = part < owner.part ? part : part - 1;
    int const rank = first_rank + owner.part;
    uint32_t const to = set_block_rank(
        cast_smem_ptr_to_uint(exchange + sender * Tile::kSenderBytes + offset), rank);
    uint32_t const barrier = set_block_rank(cast_smem_ptr_to_uint(&bars.sums_full), rank);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Tile::kSums / 4; ++i)
      send(to + i * 512, barrier, acc(4 * i), acc(4 * i + 1), acc(4 * i + 2), acc(4 * i + 3));
    return;
  }
  if (owner.place == 0 && lane == 0)
    TransactionBarrier::arrive_and_expect_tx(&bars.sums_full, Tile::kExchangeBytes);
  Barrier::wait(&bars.sums_full, tiles_before & 1);
  add_sent<Tile, Tile::kSums>(acc, exchange, offset);
  __syncwarp();
  if (lane < Tile::kSplit && lane != part)
    Barrier::arrive(&bars.sums_free, first_rank + lane, 1);
}

// The same with kSwap: every warp sends to all owners and gets from all others. Afterwards the sums
// of the CTA's own rows are the first of `acc`.
template <class Tile, class Acc>
__device__ void reduce_swapped(Acc& acc, char* exchange, Barriers& bars, int part, int tiles_before,
                               int group) {
  constexpr int kOwn = Tile::kSums / Tile::kSplit;
  int const lane = threadIdx.x % 32, warp = group * 4 + threadIdx.x / 32 % 4;
  int const first_rank = block_rank_in_cluster() / Tile::kSplit * Tile::kSplit;
  int const offset = (warp * (kOwn / 4) * 32 + lane) * 16;
  Barrier::wait(&bars.sums_free, (tiles_before & 1) ^ 1);
  CUTLASS_PRAGMA_UNROLL
  for (int owner = 0; owner < Tile::kSplit; ++owner) {
    if (owner == part) continue;
    int const sender = part < owner ? part : part - 1;
    uint32_t const to =
        set_block_rank(cast_smem_ptr_to_uint(exchange + sender * Tile::kSenderBytes + offset),
                       first_rank + owner);
    uint32_t const barrier =
        set_block_rank(cast_smem_ptr_to_uint(&bars.sums_full), first_rank + owner);
    CUTLASS_PRAGMA_UNROLL
    for (int i = owner * kOwn; i < (owner + 1) * kOwn; i += 4)
      send(to + i % kOwn * 128, barrier, acc(i), acc(i + 1), acc(i + 2), acc(i + 3));
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = kOwn; i < Tile::kSums; ++i)
    if (i / kOwn == part) acc(i % kOwn) = acc(i);
  if (warp == 0 && lane == 0)
    TransactionBarrier::arrive_and_expect_tx(&bars.sums_full, Tile::kExchangeBytes);
  Barrier::wait(&bars.sums_full, tiles_before & 1);
  add_sent<Tile, kOwn>(acc, exchange, offset);
  __syncwarp();
  if (lane < Tile::kSplit && lane != part)
    Barrier::arrive(&bars.sums_free, first_rank + lane, 1);
}

// Writes the slabs of one math group, each a (rows that this CTA owns) x 64 box in the 128-byte
// swizzle, or x 32 in the 64-byte swizzle.
template <class Tile, class Acc>
__device__ void write_slabs(Acc const& acc, char* slabs, Barriers& bars, Ring<kSlabs>& at,
                            int group, int part) {
  constexpr int kSlabsGroup = Tile::kGroupN / Tile::kSlabN;
  constexpr int kPairs = Tile::kSlabN / 16;            // 16 columns: two 16-byte chunks of a row
  constexpr int kRepeatM = Tile::kGroupM / 64;
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  bool const own = owner_of<Tile>(group, warp).part == part;
  int const row0 = (Tile::kGroupsM > 1 ? group * 64 : 0) + warp * 16 + lane % 16 -
                   part * Tile::kOutRows;
  int const first = Tile::kGroupsN > 1 ? group * kSlabsGroup : 0;
  for (int s = 0; s < first; ++s) at.advance();
  CUTLASS_PRAGMA_UNROLL
  for (int s = 0; s < kSlabsGroup; ++s, at.advance()) {
    Barrier::wait(&bars.d_empty[at.slot], at.phase ^ 1);
    char* slab = slabs + at.slot * kSlabBytes;
    CUTLASS_PRAGMA_UNROLL
    for (int r = 0; r < kRepeatM; ++r) {
      if (!own) break;
      int const row = row0 + r * 64 * Tile::kGroupsM;
      CUTLASS_PRAGMA_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t regs[4];
        CUTLASS_PRAGMA_UNROLL
        for (int q = 0; q < 4; ++q) {
          int const block = (s * kPairs + pair) * 2 + q / 2;  // of 8 columns
          float const lo = acc(make_coord(0, q % 2, block), r, 0);
          float const hi = acc(make_coord(1, q % 2, block), r, 0);
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(regs[q]) : "f"(hi), "f"(lo));
        }
        int const chunk =
            (pair * 2 + lane / 16) ^ (Tile::kSlabN == kTileK ? row % 8 : row / 2 % 4);
        SM90_U32x4_STSM_N::copy(
            regs[0], regs[1], regs[2], regs[3],
            *reinterpret_cast<uint128_t*>(slab + row * Tile::kSlabRowBytes + chunk * 16));
      }
    }
    tma_store_fence();                                // generic writes before the async reads
    cutlass::arch::NamedBarrier::sync(128, 1 + group);
    if (threadIdx.x % 128 == 0)                       // kMathGroups arrivals complete a slab
      for (int i = 0; i < Tile::kGroupsN; ++i) Barrier::arrive(&bars.d_full[at.slot]);
  }
  for (int s = first + kSlabsGroup; s < Tile::kSlabsN; ++s) at.advance();
}

// The same with kSwap, where a thread has tokens side by side: a group writes one slab, and the
// stores turn 8 features x 8 tokens to rows of tokens.
template <class Tile, class Acc>
__device__ void write_slabs_swapped(Acc const& acc, char* slabs, Barriers& bars, Ring<kSlabs>& at,
                                    int group) {
  constexpr int kBlocks = Tile::kOutRows / 8;          // of 8 tokens
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  for (int s = 0; s < group; ++s) at.advance();
  Barrier::wait(&bars.d_empty[at.slot], at.phase ^ 1);
  int const chunk = (warp * 2 + lane / 8 % 2) ^ (lane % 8);
  char* rows = slabs + at.slot * kSlabBytes + (lane / 16 * 8 + lane % 8) * kRowBytes + chunk * 16;
  CUTLASS_PRAGMA_UNROLL
  for (int block = 0; block < kBlocks; block += 2, rows += 16 * kRowBytes) {
    uint32_t regs[4];
    CUTLASS_PRAGMA_UNROLL
    for (int q = 0; q < 4; ++q) {
      int const of = min(block + q / 2, kBlocks - 1);
      float const lo = acc(make_coord(0, q % 2, of), 0, 0);
      float const hi = acc(make_coord(1, q % 2, of), 0, 0);
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(regs[q]) : "f"(hi), "f"(lo));
    }
    uint128_t& to = *reinterpret_cast<uint128_t*>(rows);
    if (block + 1 < kBlocks) SM90_U16x8_STSM_T::copy(regs[0], regs[1], regs[2], regs[3], to);
    else SM90_U16x4_STSM_T::copy(regs[0], regs[1], to);
  }
  tma_store_fence();                                  // generic writes before the async reads
  cutlass::arch::NamedBarrier::sync(128, 1 + group);
  if (threadIdx.x % 128 == 0)
    for (int i = 0; i < kMathGroups; ++i) Barrier::arrive(&bars.d_full[at.slot]);
  for (int s = group; s < Tile::kSlabsN; ++s) at.advance();
}

// Turns four registers of each of the four lanes of a quad: lane q gets what lanes 0..3 hold in q.
__device__ void transpose_quad(uint32_t (&v)[4], int lane) {
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step < 4; step *= 2) {
    bool const upper = lane & step;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const low = step == 1 ? 2 * i : i, high = low + step;
      uint32_t const got = __shfl_xor_sync(~0u, upper ? v[low] : v[high], step);
      if (upper) v[low] = got; else v[high] = got;
    }
  }
}

// Stores the rows that this warp has from registers, 16 bytes a lane and 64 a row at a time.
// `to` is row 0 of a matrix that is `width` wide and has m rows; column 0 of the tile is `column`.
template <class Tile, class Acc>
__device__ void store_rows(Acc const& acc, bf16* to, int width, int4 tile, int column, int m,
                           int group) {
  int const lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int const first_row = (Tile::kGroupsM > 1 ? group * 64 : 0) + warp * 16 + lane / 4;
  int const first_col = column + (Tile::kGroupsN > 1 ? group * Tile::kGroupN : 0) + lane % 4 * 8;
  CUTLASS_PRAGMA_UNROLL
  for (int half = 0; half < 2 * (Tile::kGroupM / 64); ++half) {   // rows and rows + 8
    int const in_tile = first_row + half % 2 * 8 + half / 2 * 64 * Tile::kGroupsM;
    bool const exists = in_tile < Tile::kRows && tile.y + in_tile < m;
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < Tile::kGroupN / 8; block += 4) {
      uint32_t v[4];
      CUTLASS_PRAGMA_UNROLL
      for (int j = 0; j < 4; ++j) {
        float const lo = acc(make_coord(0, half % 2, block + j), half / 2, 0);
        float const hi = acc(make_coord(1, half % 2, block + j), half / 2, 0);
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v[j]) : "f"(hi), "f"(lo));
      }
      transpose_quad(v, lane);
      int const col = first_col + block * 8;
      if (exists && col < width)
        *reinterpret_cast<uint4*>(to + size_t(tile.y + in_tile) * width + col) =
            make_uint4(v[0], v[1], v[2], v[3]);
    }
  }
}

// The descriptor of the same operand in another stage. Taken from lane 0, so that the compiler keeps
// it in uniform registers, where WGMMA wants it: otherwise it moves each one there, each time.
template <class Tile, class Descriptor>
__device__ Descriptor at_stage(Descriptor first, int slot) {
  first.desc_.reg32_[0] =
      __shfl_sync(~0u, first.desc_.reg32_[0] + slot * (Tile::kStageBytes / 16), 0);
  return first;
}

// One math group. `bars` are this CTA's.
struct Math {
  Params const& p;
  char *ring, *slabs, *exchange;
  Barriers& bars;
  int group;
  uint32_t epoch = 0;
  Rings rings;
  Ring<kSlabs> d_at;
  int split_tiles = 0;                      // that the cluster has added up

  // A stage is free again, in both CTAs when these loaded it together.
  template <class Tile>
  __device__ void release(uint64_t* empty) {
    if (threadIdx.x % 128 == 0) {
      if constexpr (Tile::kPairs) for (int cta = 0; cta < 2; ++cta) Barrier::arrive(empty, cta, 1);
      else Barrier::arrive(empty);
    }
  }

  // K blocks of a segment that this part of a tile sums.
  __device__ int segment_blocks(int segment, int part) {
    Blocks const blocks =
        part_of(p.segment_block[segment], p.segment_block[segment + 1], part, kDownSplit);
    return blocks.end - blocks.begin;
  }

  template <bool kIsUp>
  __device__ int k_blocks(int4 tile, int part) {
    if constexpr (kIsUp) {
      Blocks const blocks = part_of(0, p.up_k_blocks, part, kUpSplit);
      return blocks.end - blocks.begin;
    } else if constexpr (kReduce) {
      int const own = segment_blocks(segment_of(tile), part);
      if (is_partial(tile)) return own;
      Blocks const ones = part_of(0, kDownN / kTileK, part, kDownSplit);
      return own + (p.segment_count - 1) * (ones.end - ones.begin);
    } else if constexpr (kDownSplit == 1) {
      return p.segment_block[p.segment_count];
    } else {
      int count = 0;
      for (int s = 0; s < p.segment_count; ++s) count += segment_blocks(s, part);
      return count;
    }
  }

  // Stores a tile to this GPU, then to peers, and says each to the store warp.
  template <bool kIsUp, class Acc>
  __device__ void store_direct(Acc const& acc, int4 tile, int part) {
    using Tile = Layer<kIsUp>;
    bool const owns = owner_of<Tile>(group, threadIdx.x / 32 % 4).part == part;
    bool const partial = is_partial(tile), in_y1 = kIsUp || partial;
    Receivers const to = receivers_of<kIsUp>(p, tile);
    int const width = in_y1 ? p.h : p.n;
    size_t const plane = in_y1 ? size_t(epoch & 1) * p.m * p.h : 0;
    Barrier::wait(&bars.open[in_y1 ? 0 : 1], 0);
    for (int peers = 0; peers < 2; ++peers, d_at.advance()) {
      for (int d = peers ? to.own : to.begin; owns && d < (peers ? to.end : to.own); ++d) {
        int const column = partial ? partial_column(p, tile, segment_of(tile), d) : tile.w;
        bf16* rows = (in_y1 ? p.y1_to : p.y2_to)[d] + plane;
        store_rows<Tile>(acc, rows, width, tile, column, p.m, group);
      }
      cutlass::arch::NamedBarrier::sync(128 * kMathGroups, 3);
      if (threadIdx.x / 32 == 4) {          // a warp: one lane must not wait alone (see `mlp`)
        Barrier::wait(&bars.d_empty[d_at.slot], d_at.phase ^ 1);
        if (threadIdx.x == 128) Barrier::arrive(&bars.d_full[d_at.slot]);
      }
    }
  }

  template <bool kIsUp>
  __device__ void tile(int i, int part) {
    using Tile = Layer<kIsUp>;
    auto& at = rings.at<kIsUp>();
    uint64_t* full = bars.full[kRing<kIsUp>];
    uint64_t* empty = bars.empty[kRing<kIsUp>];
    int const blocks = k_blocks<kIsUp>(p.tiles[i], part);
    bool const stamps = threadIdx.x == 128;
    if (stamps) stamp(p, i, kMathWaits);
    // Operands of WGMMA: rows of A are those of its result, rows of B the columns.
    constexpr int kRowsA = kSwap ? Tile::kN : Tile::kM, kRowsB = kSwap ? Tile::kM : Tile::kN;
    constexpr int kGroupsA = kSwap ? kMathGroups : Tile::kGroupsM;
    constexpr int kGroupsB = kMathGroups / kGroupsA;
    constexpr int kAtA = kSwap ? Tile::kABytes : 0, kAtB = kSwap ? 0 : Tile::kABytes;
    using Atom = typename Wgmma<kRowsB / kGroupsB>::Atom;
    auto mma = make_tiled_mma(Atom{}, Layout<Shape<Int<kGroupsA>, Int<kGroupsB>, _1>>{});
    auto layout_a =
        tile_to_shape(GMMA::Layout_K_SW128_Atom<bf16>{}, Shape<Int<kRowsA>, Int<kTileK>>{});
    auto layout_b =
        tile_to_shape(GMMA::Layout_K_SW128_Atom<bf16>{}, Shape<Int<kRowsB>, Int<kTileK>>{});
    auto thread = mma.get_slice(128 * group);
    // Descriptors of stage 0 (m or n, k): a stage further is kStageBytes further.
    auto frag_a = thread.make_fragment_A(thread.partition_A(
        make_tensor(make_smem_ptr(reinterpret_cast<bf16*>(ring + kAtA)), layout_a)));
    auto frag_b = thread.make_fragment_B(thread.partition_B(
        make_tensor(make_smem_ptr(reinterpret_cast<bf16*>(ring + kAtB)), layout_b)));
    auto acc = partition_fragment_C(mma, Shape<Int<kRowsA>, Int<kRowsB>>{});
    if (Tile::kSplit > 1 && blocks == 0) clear(acc);

    mma.accumulate_ = GMMA::ScaleOut::Zero;
    int previous = -1;
    for (int kb = 0; kb < blocks; ++kb, at.advance()) {
      Barrier::wait(&full[at.slot], at.phase);
      if (stamps && kb == 0) stamp(p, i, kMathStarts);
      auto a = make_tensor(at_stage<Tile>(frag_a.data(), at.slot), frag_a.layout());
      auto b = make_tensor(at_stage<Tile>(frag_b.data(), at.slot), frag_b.layout());
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
      if (previous >= 0) release<Tile>(&empty[previous]);
      previous = at.slot;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
    if (previous >= 0) release<Tile>(&empty[previous]);
    if (stamps) stamp(p, i, kMathEnds);
    if constexpr (Tile::kSplit > 1 && kSwap)
      reduce_swapped<Tile>(acc, exchange, bars, part, split_tiles++, group);
    else if constexpr (Tile::kSplit > 1)
      reduce<Tile>(acc, exchange, bars, part, split_tiles++, group);
    if constexpr (kDirect) store_direct<kIsUp>(acc, p.tiles[i], part);
    else if constexpr (kSwap) write_slabs_swapped<Tile>(acc, slabs, bars, d_at, group);
    else write_slabs<Tile>(acc, slabs, bars, d_at, group, part);
    if (stamps) stamp(p, i, kSlabsWritten);
  }

  __device__ void run() {
    wait_for_previous();
    epoch = p.calls[0];
    for (int i = blockIdx.x; i < p.tile_count; i += gridDim.x) {
      int const layer = layer_of(p.tiles[i]);
      if (layer == kUpTile) tile<true>(i, i % kUpSplit);
      else if (layer < kNoTile) tile<false>(i, i % kDownSplit);
    }
  }
};

// Nobody uses a barrier before it is initialised: every warp waits for warp 0, which does that, and
// itself waits only where it sends to another CTA.
__device__ void init_barriers(Barriers& bars) {
  int const warp = threadIdx.x / 32;
  if (warp == 0) {
    if (elect_one_sync()) {
      for (int r = 0; r < (kOneRing ? 1 : 2); ++r)
        for (int i = 0; i < kMaxStages; ++i) {
          Barrier::init(&bars.full[r][i], 1);
          Barrier::init(&bars.empty[r][i], kMathGroups * ((r ? Down::kPairs : Up::kPairs) ? 2 : 1));
        }
      for (int i = 0; i < kSlabs; ++i) {
        Barrier::init(&bars.d_full[i], kDirect ? 1 : kMathGroups);
        Barrier::init(&bars.d_empty[i], 1);
      }
      for (int i = 0; i < 2; ++i) Barrier::init(&bars.open[i], 1);
      Barrier::init(&bars.sums_full, 1);
      int const readers = 4 * kMathGroups / (kSwap ? 1 : kMaxSplit);  // warps of one other CTA
      Barrier::init(&bars.sums_free, max_of(1, (kMaxSplit - 1) * readers));
      if constexpr (Down::kPairs && !Up::kPairs) Barrier::init(&bars.drained, 2);
      cutlass::arch::fence_barrier_init();
    }
    __syncwarp();
  }
  if constexpr (kCluster > 1) {
    cluster_arrive_relaxed();
    if (kMulticast || warp > 0) cluster_wait();
  } else if (warp > 0) {
    cutlass::arch::NamedBarrier::sync(kThreads, 4);
  } else {
    cutlass::arch::NamedBarrier::arrive(kThreads, 4);
  }
}

// Nobody leaves while others of its cluster may write to its shared memory.
__device__ void leave_together() {
  __syncwarp();
  if constexpr (kCluster == 1) { __syncthreads(); return; }
  if (!kMulticast && threadIdx.x < 32) cluster_wait();  // the first meeting
  cluster_sync();
}

// -------------------------------------------------------------------------------------- kernel

extern "C" __global__ __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
void mlp(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) char smem[];
  char* ring = smem;
  char* slabs = smem + kRingBytes;
  char* exchange = slabs + kSlabs * kSlabBytes;
  Barriers& bars = *reinterpret_cast<Barriers*>(exchange + kExchangeBytes);
  int const warp = threadIdx.x / 32;
  init_barriers(bars);

  if (warp < 4) {
    if constexpr (kMathGroups > 1) cutlass::arch::warpgroup_reg_dealloc<40>();
    // One lane runs a list, and the others of its warp leave the kernel (barriers wait for threads
    // that have not). When that lane sleeps at a barrier, lanes that wait for it to come back may
    // go on, and then write to uniform registers of the warp that one of its TMA instructions has
    // yet to read (docs/decisions.md).
    bool const elected = elect_one_sync();
    if (warp < 2 && !elected) return;
    if (warp == 0 && elected) Loader{p, ring, bars}.run();
    if (warp == 1 && elected) Storer{p, slabs, bars}.run();
  } else {
    if constexpr (kMathGroups > 1) cutlass::arch::warpgroup_reg_alloc<232>();
    int const group = __shfl_sync(~0u, warp / 4 - 1, 0);
    Math{p, ring, slabs, exchange, bars, group}.run();
  }

  leave_together();
  if (threadIdx.x == 128) {                 // a thread that is still here
    if (atomicAdd(&p.calls[kLine], 1u) + 1 == gridDim.x) {
      p.calls[kLine] = 0;                   // of this GPU alone: the next call starts after us
      if (++p.calls[0] == 0) ++p.calls[1];
    }
  }
}
