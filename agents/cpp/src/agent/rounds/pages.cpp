// Announcements whose offers stand in a blob (docs/protocol.md, Pages).
#include "agent/rounds/scheduler.h"
#include "link/session.h"
#include "wire/errors.h"

namespace edgefl {

// With all that it offers; nothing while that is to be read.
std::shared_ptr<const Round> RoundScheduler::whole() {
  if (!announced_->pages) return announced_;
  const std::lock_guard<std::mutex> guard(lock_);
  if (!page_ || !(page_->first == *announced_->pages)) return nullptr;
  auto found = std::make_shared<Round>(*announced_);
  found->offers = page_->second.offers;
  found->units = page_->second.units;
  found->live = page_->second.live;
  found->pages.reset();
  return found;
}

void RoundScheduler::begin_page() {
  const BlobRef page = *announced_->pages;
  const auto again = failed_.find(page.sha256);
  if ((again != failed_.end() && monotonic_s() < again->second) || !takes_part()) return;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    reading_ = page;
  }
  start([this, page, announced = announced_] { attempt_page(page, announced); });
}

bool RoundScheduler::takes_part() const {
  if (const auto data = store_.job()) {
    const auto job = decode_job(*data);
    if (job && job->is_open(*announced_) && !job->is_replaced(task_)) return true;
    store_.close_job();
  }
  if (!task_ || task_->run != announced_->run || !announced_->takes(task_->round)) return false;
  return !store_.waits(task_->nonce) && !store_.is_past(task_->nonce);
}

void RoundScheduler::attempt_page(const BlobRef& page, std::shared_ptr<const Round> announced) {
  try {
    Round found = host_.read(*announced);
    const std::lock_guard<std::mutex> guard(lock_);
    page_ = {page, std::move(found)};
  } catch (const RoundAborted&) {  // another one is announced
  } catch (const std::exception& error) {
    std::string tier;
    {
      const std::lock_guard<std::mutex> guard(lock_);
      if (task_) tier = task_->tier;
    }
    fail(page.sha256, announced->round, tier, error);
  }
  const std::lock_guard<std::mutex> guard(lock_);
  reading_.reset();
}

}  // namespace edgefl
