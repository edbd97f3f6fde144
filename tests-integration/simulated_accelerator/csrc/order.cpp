#include "order.h"

#include <algorithm>

namespace sim {
namespace {

constexpr size_t kFrames = 6;

std::string key(const Operation& operation) {
  std::string text = operation.name + "|" + std::to_string(operation.actor);
  if (!operation.place.empty()) {
    text += "|" + operation.place[0]->file + ":" + std::to_string(operation.place[0]->line);
  }
  return text;
}

}  // namespace

uint64_t Clock::tick(Actor actor) {
  if (times_.size() <= actor) times_.resize(actor + 1, 0);
  return ++times_[actor];
}

void Clock::join(const Clock& other) {
  if (times_.size() < other.times_.size()) times_.resize(other.times_.size(), 0);
  for (size_t i = 0; i < other.times_.size(); ++i) times_[i] = std::max(times_[i], other.times_[i]);
}

Order& order() {
  static Order* instance = new Order();  // leaked: streams run until the process ends
  return *instance;
}

Actor Order::add_stream(const std::string& name) {
  std::lock_guard<std::mutex> guard(lock_);
  clocks_.emplace_back();
  names_.push_back(name);
  return static_cast<Actor>(clocks_.size() - 1);
}

std::string Order::name(Actor actor) {
  std::lock_guard<std::mutex> guard(lock_);
  return names_.at(actor);
}

// The clock of a stream's next operation: behind the stream's last one, and behind the host until now.
Clock& Order::advance(Actor stream) {
  Clock& clock = clocks_[stream];
  clock.join(clocks_[kHost]);
  clock.tick(stream);
  clocks_[kHost].tick(kHost);  // what the host does from now on is not before this operation
  return clock;
}

void Order::enqueue(Actor stream, const std::string& name, const std::vector<Range>& ranges) {
  const bool checked = checks_ && !ranges.empty();
  Place place = checked ? here(kFrames) : Place{};
  std::string at = checked ? node() : std::string();
  std::lock_guard<std::mutex> guard(lock_);
  const Clock& clock = advance(stream);
  if (!checked) return;
  auto now = operation(stream, name, std::move(place), std::move(at), clock.at(stream));
  for (const Range& range : ranges) access(now, clock, range, {});
}

void Order::on_host(const std::string& name, const std::vector<Range>& ranges) {
  if (!checks_) return;
  Place place = here(kFrames);
  std::string at = node();
  std::lock_guard<std::mutex> guard(lock_);
  Clock& clock = clocks_[kHost];
  auto now = operation(kHost, name, std::move(place), std::move(at), clock.tick(kHost));
  for (const Range& range : ranges) access(now, clock, range, {});
}

Clock Order::record(Actor stream) {
  std::lock_guard<std::mutex> guard(lock_);
  return advance(stream);
}

void Order::wait(Actor stream, const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock_);
  advance(stream).join(clock);
}

void Order::host_waited(const Clock& clock) {
  std::lock_guard<std::mutex> guard(lock_);
  clocks_[kHost].join(clock);
}

Clock Order::of(Actor stream) {
  std::lock_guard<std::mutex> guard(lock_);
  return clocks_[stream];
}

void Order::allocate(Actor stream, uintptr_t begin, size_t size) {
  if (!checks_) return;
  Place place = here(kFrames);
  std::string at = node();
  std::lock_guard<std::mutex> guard(lock_);
  const Clock& clock = advance(stream);
  erase(begin, begin + size);
  auto now = operation(stream, "allocate", std::move(place), std::move(at), clock.at(stream));
  segments_[begin] = Segment{begin + size, now, {}};
}

void Order::release(Actor stream, uintptr_t begin, size_t size, const std::set<Actor>& recorded) {
  if (!checks_) return;
  Place place = here(kFrames);
  std::string at = node();
  std::lock_guard<std::mutex> guard(lock_);
  const Clock& clock = advance(stream);
  auto now = operation(stream, "free", std::move(place), std::move(at), clock.at(stream));
  access(now, clock, Range{begin, begin + size, true}, recorded);
  erase(begin, begin + size);
}

void Order::forget(uintptr_t begin, size_t size) {
  std::lock_guard<std::mutex> guard(lock_);
  erase(begin, begin + size);
}

void Order::check(bool enabled) {
  std::lock_guard<std::mutex> guard(lock_);
  checks_ = enabled;
  segments_.clear();
  if (enabled) races_.clear();
}

std::vector<Race> Order::races() {
  std::lock_guard<std::mutex> guard(lock_);
  std::vector<Race> found;
  for (const auto& item : races_) found.push_back(item.second);
  return found;
}

OperationPtr Order::operation(Actor actor, const std::string& name, Place place, std::string node, uint64_t time) {
  return std::make_shared<const Operation>(Operation{name, actor, time, std::move(place), std::move(node)});
}

// The segment that begins at ``address``, made from the one around it; the next one if none is around it.
Order::Segments::iterator Order::split(uintptr_t address) {
  auto next = segments_.lower_bound(address);
  if (next != segments_.end() && next->first == address) return next;
  if (next == segments_.begin()) return next;
  auto around = std::prev(next);
  if (around->second.end <= address) return next;
  Segment rest = around->second;
  around->second.end = address;
  return segments_.emplace_hint(next, address, std::move(rest));
}

void Order::erase(uintptr_t begin, uintptr_t end) {
  auto first = split(begin);
  auto last = split(end);
  // The second split may have cut the segment that the first one returned; its begin is still the first's.
  segments_.erase(first, last);
}

void Order::access(const OperationPtr& now, const Clock& clock, const Range& range, const std::set<Actor>& exempt) {
  if (range.begin >= range.end) return;
  auto segment = split(range.begin);
  const auto last = split(range.end);
  if (range.write) {
    for (auto it = segment; it != last; ++it) {
      const uint64_t bytes = it->second.end - it->first;
      if (it->second.write) compare(it->second.write, true, now, clock, true, bytes, exempt);
      for (const auto& read : it->second.reads) compare(read, false, now, clock, true, bytes, exempt);
    }
    segments_.erase(segment, last);
    segments_[range.begin] = Segment{range.end, now, {}};
    return;
  }
  uintptr_t covered = range.begin;
  std::vector<std::pair<uintptr_t, uintptr_t>> unknown;  // no access was seen there before
  for (auto it = segment; it != last; ++it) {
    if (it->first > covered) unknown.emplace_back(covered, it->first);
    covered = it->second.end;
    if (it->second.write) compare(it->second.write, true, now, clock, false, it->second.end - it->first, exempt);
    auto& reads = it->second.reads;
    auto mine = std::find_if(reads.begin(), reads.end(), [&](const auto& r) { return r->actor == now->actor; });
    if (mine != reads.end()) {
      *mine = now;
    } else {
      reads.push_back(now);
    }
  }
  if (covered < range.end) unknown.emplace_back(covered, range.end);
  for (const auto& gap : unknown) segments_[gap.first] = Segment{gap.second, nullptr, {now}};
}

void Order::compare(const OperationPtr& before, bool before_writes, const OperationPtr& now, const Clock& clock,
                    bool write, uint64_t bytes, const std::set<Actor>& exempt) {
  if (before == now || clock.covers(before->actor, before->time) || exempt.count(before->actor)) return;
  auto [found, fresh] = races_.try_emplace(key(*before) + " / " + key(*now));
  if (fresh) found->second = Race{before, now, before_writes, write, bytes, 0};
  ++found->second.count;
}

}  // namespace sim
